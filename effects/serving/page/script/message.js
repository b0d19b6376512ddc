// How an answer looks: its text, what may be done with it, and what it took.

import { details, summary, wasCutShort } from "./about.js";
import { isRunning } from "./answer.js";
import { callsView, thoughtView } from "./beside.js";
import { copy, el, icon, tool } from "./dom.js";
import { render } from "./markdown.js";
import { question } from "./question.js";
import { model } from "./server.js";
import { settings } from "./store.js";

// The element of a message, with an `update` that shows what it is by now.
export function messageView(talk, message, acts) {
  const isQuestion = message.role === "user";
  return isQuestion ? question(talk, message, acts) : answerView(talk, message, acts);
}

function answerView(talk, message, acts) {
  const given = givenTo(talk, message);
  const thought = thoughtView();
  const text = el("div", { className: "text" });
  const calls = callsView();
  const error = el("p", { className: "error", role: "alert" });
  const about = el("p", { className: "about" });
  const look = { given, plain: false, busy: false };
  const tools = toolbar(message, acts, look, () => showText(text, message, look));
  const footer = el("footer", {}, tools, about);
  const properties = { className: "assistant", ariaLabel: model.id };
  const view = el("article", properties, thought, text, calls, error, footer);
  view.update = () => {
    const last = talk.messages.at(-1) === message;
    look.busy = last && isRunning(talk);
    view.ariaBusy = String(look.busy);
    view.classList.toggle("busy", look.busy);
    view.classList.toggle("last", last);
    tools.update(last);
    thought.update(message, look.busy);
    calls.update(message);
    showText(text, message, look);
    error.textContent = message.error ?? "";
    about.textContent = summary(message.about, look.busy);
    about.title = details(message.about);
  };
  return view;
}

// What a completion goes on from; null in a chat.
function givenTo(talk, message) {
  if (model.chat) return null;
  return talk.messages[talk.messages.indexOf(message) - 1]?.content ?? "";
}

function toolbar(message, acts, look, show) {
  const { given } = look;
  const copyIt = (button) => copy((given ?? "") + message.content, button);
  const again = () => acts.again(message);
  const toPlain = tool("plain", "Show as plain text", () => {
    look.plain = !look.plain;
    toPlain.ariaPressed = String(look.plain);
    show();
  });
  const usual = [tool("copy", "Copy", copyIt), tool("again", "Write it again", again)];
  if (given === null) usual.push(toPlain);
  const edit = tool("edit", "Edit the prompt", () => acts.reuse(given));
  const goOn = worded("on", "Continue", () => acts.goOn(message));
  const retry = worded("again", "Try again", again);
  edit.hidden = given === null;
  const bar = el("div", { className: "tools" }, ...usual, edit, goOn, retry);
  bar.update = (last) => {
    const mayGoOn = given !== null || wasCutShort(message.about);
    for (const one of usual) one.hidden = !message.content;
    goOn.hidden = !(last && message.content && mayGoOn);
    retry.hidden = Boolean(message.content || message.calls?.length);
  };
  return bar;
}

function worded(name, words, act) {
  const properties = { className: "quiet words", type: "button", onclick: act };
  return el("button", properties, icon(name), words);
}

// Show a message's text, if it or how it is to look has changed.
function showText(into, { content, thought, calls }, { given, plain, busy }) {
  const asSource = plain || given !== null || !settings().markdown;
  const waits = busy && !content && !thought && !calls?.length;
  const wanted = `${asSource} ${waits} ${content}`;
  if (into.wanted === wanted) return;
  into.wanted = wanted;
  into.classList.toggle("source", asSource);
  if (asSource || !content || into.shown === undefined) {
    into.replaceChildren();
    into.shown = undefined;
  }
  if (given !== null) into.append(el("span", { className: "given" }, given), content);
  else if (!content) into.append(...(waits ? [dots()] : []));
  else if (asSource) into.append(content);
  else render(into, content);
}

function dots() {
  return el(
    "span",
    { className: "dots", ariaLabel: "Waiting for the first token" },
    el("i"),
    el("i"),
    el("i"),
  );
}

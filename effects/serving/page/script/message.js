// How one message looks: its text, what may be done with it, and what it took.

import { isRunning } from "./answer.js";
import { copy, el, icon, tool } from "./dom.js";
import { rate, seconds, tokens } from "./format.js";
import { render } from "./markdown.js";
import { model } from "./server.js";
import { settings } from "./store.js";

const FEW = 2; // tokens before there is a rate to speak of
const LONG_WAIT = 0.05; // seconds in line that are worth a word
const ENDS = { length: "cut off at max tokens", stopped: "stopped", cancelled: "cancelled", error: "failed" };

// The element of a message, with an `update` that shows what it is by now.
export function messageView(talk, message, acts) {
  return message.role === "user" ? question(message, acts) : answerView(talk, message, acts);
}

function question(message, acts) {
  const text = el("div", { className: "text" }, message.content);
  const tools = el("div", { className: "tools" });
  tools.append(
    tool("copy", "Copy", (button) => copy(message.content, button)),
    tool("edit", "Edit and send again", () => edit(message, view, acts)),
  );
  const view = el("article", { className: "user", ariaLabel: "You" }, text, tools);
  view.update = () => {};
  return view;
}

// The message becomes a field; what comes after it goes once it is sent.
function edit(message, view, acts) {
  const area = el("textarea", { value: message.content, ariaLabel: "Edit the message" });
  const before = [...view.childNodes];
  const back = () => view.replaceChildren(...before);
  const send = () => area.value.trim() && acts.resend(message, area.value);
  const cancel = el("button", { type: "button", onclick: back }, "Cancel");
  const go = el("button", { type: "button", className: "main", onclick: send }, "Send");
  area.onkeydown = (event) => {
    if (event.key === "Escape") back();
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
    event.stopPropagation();
  };
  view.replaceChildren(el("div", { className: "editing" }, area, el("div", { className: "buttons" }, cancel, go)));
  area.style.height = `${area.scrollHeight + 2}px`;
  area.focus();
}

function answerView(talk, message, acts) {
  const given = givenTo(talk, message);
  const text = el("div", { className: "text" });
  const error = el("p", { className: "error", role: "alert" });
  const about = el("p", { className: "about" });
  const tools = el("div", { className: "tools" });
  const view = el("article", { className: "assistant", ariaLabel: model.id }, text, error, el("footer", {}, tools, about));
  let plain = false;
  const show = () => showText(text, message, { plain, given, busy: view.ariaBusy === "true" });
  const toPlain = tool("plain", "Show as plain text", () => {
    plain = !plain;
    toPlain.ariaPressed = String(plain);
    text.shown = undefined;
    text.replaceChildren();
    show();
  });
  const goOn = el("button", { className: "quiet words", type: "button", onclick: () => acts.goOn(message) }, icon("on"), "Continue");
  tools.append(
    tool("copy", "Copy", (button) => copy((given ?? "") + message.content, button)),
    tool("again", "Write it again", () => acts.again(message)),
    ...(given === null ? [toPlain] : [tool("edit", "Edit the prompt", () => acts.reuse(given))]),
    goOn,
  );
  view.update = () => {
    const last = talk.messages.at(-1) === message;
    const busy = isRunning(talk) && last;
    view.ariaBusy = String(busy);
    view.classList.toggle("busy", busy);
    view.classList.toggle("last", last);
    goOn.hidden = !last || !message.content || (given === null && message.about?.finish !== "length" && message.about?.finish !== "stopped");
    show();
    error.textContent = message.error ?? "";
    about.textContent = summary(message.about, busy);
    about.title = details(message.about);
  };
  return view;
}

// What a completion goes on from; null in a chat.
function givenTo(talk, message) {
  return model.chat ? null : (talk.messages[talk.messages.indexOf(message) - 1]?.content ?? "");
}

function showText(into, message, { plain, given, busy }) {
  into.classList.toggle("source", plain || given !== null || !settings().markdown);
  if (!message.content && given === null) {
    into.replaceChildren(...(busy ? [dots()] : []));
    into.shown = undefined;
  } else if (given !== null) {
    into.replaceChildren(el("span", { className: "given" }, given), message.content);
  } else if (plain || !settings().markdown) {
    into.textContent = message.content;
  } else {
    if (into.shown === undefined) into.replaceChildren();
    render(into, message.content);
  }
}

function dots() {
  return el("span", { className: "dots", ariaLabel: "Waiting for the first token" }, el("i"), el("i"), el("i"));
}

function summary(about, busy) {
  if (!about?.tokens) return about?.finish === "stopped" ? "stopped" : "";
  const parts = [`${about.exact ? "" : "about "}${tokens(about.tokens)}`];
  const pace = speed(about);
  if (pace) parts.push(`${rate(pace)} tokens/s`);
  if (about.first !== null) parts.push(`first after ${seconds(about.first)}`);
  if (about.waited > LONG_WAIT) parts.push(`${seconds(about.waited)} of it in line`);
  if (!busy && ENDS[about.finish]) parts.push(ENDS[about.finish]);
  return parts.join(" · ");
}

// Tokens a second, once writing had begun.
function speed({ tokens: written, first, seconds: passed }) {
  return written > FEW && passed > first ? (written - 1) / (passed - first) : 0;
}

function details(about) {
  if (!about?.exact) return "";
  const cached = about.cached ? `, ${about.cached} of them from the prefix cache` : "";
  return `The prompt had ${tokens(about.prompt)}${cached}.`;
}

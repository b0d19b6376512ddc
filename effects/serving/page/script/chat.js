// The conversation that is shown, and what one does with it.

import { isRunning, stop, write } from "./answer.js";
import { showList } from "./conversations.js";
import { $, changeIcon, el, say } from "./dom.js";
import { count } from "./format.js";
import { messageView } from "./message.js";
import { keepUp, toEnd } from "./scroll.js";
import { model } from "./server.js";
import { newTalk, save, talks, unanswered } from "./store.js";

const FRAME = 50; // milliseconds from one look of a growing answer to the next
const EXAMPLES = [
  "Explain how a hash map works.",
  "Write a haiku about waiting in line.",
  "What is the difference between a process and a thread?",
];
const OF_BUNDLED = [
  "Extract name, age and city as JSON: Anna is 31 years old and lives in Oslo.",
  "Sort 42, 7, 19, 3.",
  "Write a Python function is_prime.",
];
const BUNDLED = "bundled"; // what minfer's own small model is called
const OF_ITSELF =
  "This is the small model that comes with minfer: 6 million parameters. It sorts, reckons, " +
  "extracts JSON and calls tools, and knows nothing of the world; for that, serve a real model.";
const NO_TEMPLATE =
  "It has no chat template: give it the beginning of a text, and it goes on.";
const TO_GO_ON = ["def fibonacci(n):", "class Stack:", "Once upon a time"];

let shown = newTalk();

export function current() {
  return shown;
}

export function open(talk) {
  shown = talk;
  $("talk").replaceChildren(
    ...talk.messages.filter(visible).map((one) => messageView(talk, one, acts)),
  );
  if (!talk.messages.length) $("talk").append(welcome());
  refresh();
  toEnd();
  showList(shown, { open, begin });
}

// A completion shows its prompt in front of what follows from it.
function visible({ role }) {
  return model.chat || role === "assistant";
}

export function begin() {
  open(newTalk());
  $("input").focus();
}

export function openLast() {
  open(talks()[0] ?? newTalk());
}

function welcome() {
  const offer = (text) => {
    const act = () => submit(text);
    return el("button", { className: "example", type: "button", onclick: act }, text);
  };
  return el(
    "section",
    { className: "welcome" },
    el("h2", {}, model.id || "minfer"),
    el("p", {}, introduction()),
    el("div", { className: "examples" }, ...examples().map(offer)),
  );
}

function introduction() {
  if (model.chat && model.id === BUNDLED) return OF_ITSELF;
  const kind = model.chat ? "a conversation" : "text";
  const holds = `It holds ${count(model.max_model_len)} tokens of ${kind}.`;
  return model.chat ? `Ask it something. ${holds}` : `${NO_TEMPLATE} ${holds}`;
}

function examples() {
  if (!model.chat) return TO_GO_ON;
  return model.id === BUNDLED ? OF_BUNDLED : EXAMPLES;
}

export function submit(text) {
  const talk = shown;
  if (isRunning(talk) || !text.trim()) return;
  talk.messages.push({ role: "user", content: text });
  save(talk);
  answer(talk);
}

const acts = {
  again: (message) => replaceFrom(message),
  resend: (message, content) => replaceFrom(message, { role: "user", content }),
  goOn: (message) => {
    const talk = shown;
    if (!isRunning(talk)) follow(talk, message);
  },
  reuse: (text) => {
    $("input").value = text;
    $("input").dispatchEvent(new Event("input"));
    $("input").focus();
  },
};

// What stands from a message on goes, and is written anew.
function replaceFrom(message, instead) {
  const talk = shown;
  if (isRunning(talk)) stop(talk);
  if (unanswered(talk.messages, message)) {
    sendAgain(talk, message, instead);
    return;
  }
  talk.messages.splice(talk.messages.indexOf(message));
  if (instead) talk.messages.push(instead);
  answer(talk);
}

// What came to nothing is asked again at the end: nothing that came later builds on it.
function sendAgain(talk, message, instead) {
  const at = talk.messages.indexOf(message) - (message.role === "user" ? 0 : 1);
  const [question] = talk.messages.splice(at, 2);
  talk.messages.push(instead ?? question);
  answer(talk);
}

function answer(talk) {
  const message = { role: "assistant", content: "" };
  talk.messages.push(message);
  open(talk);
  follow(talk, message);
}

async function follow(talk, message) {
  let due = 0;
  const changed = () => {
    due ||= setTimeout(() => {
      due = 0;
      if (shown.id === talk.id) refresh();
    }, FRAME);
  };
  const writing = write(talk, message, changed);
  refresh();
  showList(shown, { open, begin });
  await writing;
  if (shown.id === talk.id) say(message.error || "The answer is complete");
  showList(shown, { open, begin });
}

// Show what has changed.
function refresh() {
  const busy = isRunning(shown);
  for (const view of $("talk").children) view.update?.();
  keepUp();
  const button = $("send");
  button.ariaLabel = button.title = busy ? "Stop" : "Send";
  button.classList.toggle("stop", busy);
  button.disabled = !busy && !$("input").value.trim();
  changeIcon(button, busy ? "stop" : "send");
}

export { refresh };

// What an answer has besides its text: what the model thought before, and what it calls.

import { el } from "./dom.js";
import { seconds } from "./format.js";

// Folded: who wants to read how the model came to its answer opens it.
export function thoughtView() {
  const words = el("summary");
  const text = el("div", { className: "thoughts" });
  const view = el("details", { className: "thought", hidden: true }, words, text);
  let shown = "";
  view.update = ({ thought = "", content, calls, about }, busy) => {
    view.hidden = !thought;
    const thinks = busy && !content && !calls?.length;
    view.classList.toggle("thinks", thinks);
    words.textContent = thinks ? "Thinking" : ended(about);
    if (thought === shown) return;
    if (thought.startsWith(shown)) text.append(thought.slice(shown.length));
    else text.textContent = thought;
    shown = thought;
  };
  return view;
}

function ended(about) {
  return about?.thinking ? `Thought for ${seconds(about.thinking)}` : "Thought";
}

// Calls of tools, which this page only shows: nobody here answers them.
export function callsView() {
  const view = el("div", { className: "calls", hidden: true });
  view.update = ({ calls = [] }) => {
    view.hidden = !calls.length;
    while (view.children.length < calls.length) view.append(callView());
    calls.forEach((call, at) => view.children[at].update(call));
    while (view.children.length > calls.length) view.lastChild.remove();
  };
  return view;
}

function callView() {
  const name = el("code");
  const text = el("pre");
  const view = el("details", { className: "call", open: true });
  view.append(el("summary", {}, "Calls ", name), text);
  view.update = (call) => {
    name.textContent = call.name;
    text.textContent = call.arguments;
  };
  return view;
}

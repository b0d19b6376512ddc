// How a question looks, and how it is edited.

import { copy, el, tool } from "./dom.js";
import { unanswered } from "./store.js";

const LEFT_OUT = "Not sent: later messages leave it out";

export function question(talk, message, acts) {
  const text = el("div", { className: "text" }, message.content);
  const tools = el("div", { className: "tools" });
  tools.append(
    tool("copy", "Copy", (button) => copy(message.content, button)),
    tool("edit", "Edit and send again", () => edit(message, view, acts)),
  );
  const note = el("p", { className: "unsent" });
  const view = el("article", { className: "user", ariaLabel: "You" }, text, tools, note);
  view.update = () => {
    const unsent = unanswered(talk.messages, message);
    note.textContent = unsent ? LEFT_OUT : "";
    view.classList.toggle("out", unsent);
  };
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
  view.replaceChildren(
    el(
      "div",
      { className: "editing" },
      area,
      el("div", { className: "buttons" }, cancel, go),
    ),
  );
  area.style.height = `${area.scrollHeight + 2}px`;
  area.focus();
}

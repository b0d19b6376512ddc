// The field at the bottom, and the button beside it.

import { isRunning, stop } from "./answer.js";
import { current, refresh, submit } from "./chat.js";
import { $ } from "./dom.js";
import { model } from "./server.js";

export function listenToComposer() {
  const input = $("input");
  input.placeholder = model.chat ? "Write a message" : "The beginning of a text";
  input.classList.toggle("source", !model.chat);
  input.oninput = fit;
  input.onkeydown = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!isRunning(current())) send();
  };
  $("composer").onsubmit = (event) => {
    event.preventDefault();
    if (isRunning(current())) stop(current());
    else send();
  };
  document.addEventListener("keydown", ({ key }) => {
    if (key === "Escape" && !document.querySelector("dialog[open]")) stop(current());
  });
  window.addEventListener("resize", fit);
  fit();
}

function send() {
  const text = $("input").value;
  if (!text.trim()) return;
  $("input").value = "";
  fit();
  submit(text);
}

// The field is as high as what is written in it, up to what the style sheet allows.
function fit() {
  const input = $("input");
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight}px`;
  refresh();
}

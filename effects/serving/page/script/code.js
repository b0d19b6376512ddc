// A block of code: its language, a button that copies it, and the text.

import { copy, el, tool } from "./dom.js";

export function code(text, name) {
  const inner = el("code", {}, text);
  const button = tool("copy", "Copy this code", () => copy(inner.textContent, button));
  const label = el("figcaption", {}, el("span", {}, name), button);
  const block = el(
    "figure",
    { className: "code" },
    label,
    el("pre", { tabIndex: 0 }, inner),
  );
  block.dataset.code = name;
  return block;
}

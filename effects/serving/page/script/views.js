// Shows the prompt, the live view or both, as the address has it after its #.

import { $ } from "./dom.js";
import { setListening } from "./live.js";

const VIEWS = ["prompt", "live", "both"];
const ROOM = matchMedia("(min-width: 1100px)"); // for both, side by side

export function listenToViews() {
  window.onhashchange = show;
  ROOM.onchange = show;
  document.onvisibilitychange = show;
  show();
}

function show() {
  const requested = location.hash.slice(1);
  const view = !VIEWS.includes(requested)
    ? "prompt"
    : requested === "both" && !ROOM.matches
      ? "live"
      : requested;
  document.body.dataset.view = view;
  for (const link of document.querySelectorAll(".segments a")) {
    if (link.dataset.view === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  $("prompt").inert = view === "live";
  $("live").inert = view === "prompt";
  setListening(view !== "prompt" && !document.hidden);
}

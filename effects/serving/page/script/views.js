// Which of prompt and live view is shown: what the address says after its #.

import { $ } from "./dom.js";
import { look } from "./live.js";

const VIEWS = ["prompt", "live", "both"];
const ROOM = matchMedia("(min-width: 1100px)"); // for both, side by side

export function listenToViews() {
  window.onhashchange = show;
  ROOM.onchange = show;
  document.onvisibilitychange = show;
  show();
}

function show() {
  const asked = location.hash.slice(1);
  const view = !VIEWS.includes(asked)
    ? "prompt"
    : asked === "both" && !ROOM.matches
      ? "live"
      : asked;
  document.body.dataset.view = view;
  for (const link of document.querySelectorAll(".segments a")) {
    if (link.dataset.view === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  $("prompt").inert = view === "live";
  $("live").inert = view === "prompt";
  look(view !== "prompt" && !document.hidden);
}

// Buttons and keys.

import { axis, cutPauses, edge, look, view, zoom } from "./axis.js";
import { readColors } from "./canvas.js";
import { $ } from "./dom.js";
import { decided } from "./lives.js";
import { choose, go, restore } from "./navigation.js";
import { play } from "./playback.js";
import { refresh } from "./redraw.js";
import { scrollRows, toggleAllRows } from "./rows.js";
import { turns } from "./run.js";
import { find } from "./search.js";
import { cursor } from "./selection.js";

const FEW_ROWS = 3; // that a key scrolls by

const buttons = {
  play: () => play(),
  back: () => go(cursor - 1),
  on: () => go(cursor + 1),
  nearer: () => zoom(0.5, edge[cursor]),
  farther: () => zoom(2, edge[cursor]),
  fit: () => {
    view.tall = 1;
    look(0, edge[turns]);
  },
  "by-time": () => axis("time"),
  "by-turn": () => axis("turn"),
  "cut-pauses": () => axis(cutPauses() ? "clock" : "time"),
  "all-rows": toggleAllRows,
};

const keys = {
  ArrowLeft: buttons.back,
  ArrowRight: buttons.on,
  ShiftArrowLeft: () => go(decided.findLast((t) => t < cursor) ?? cursor),
  ShiftArrowRight: () => go(decided.find((t) => t > cursor) ?? cursor),
  Home: () => go(0),
  End: () => go(turns - 1),
  Escape: () => choose(-1),
  " ": buttons.play,
  "+": buttons.nearer,
  "-": buttons.farther,
  0: buttons.fit,
  "/": () => $("query").focus(),
};

// These scroll the rows, if there are more than can be seen; else they are the browser's.
const rowKeys = {
  ArrowUp: () => scrollRows(view.top - FEW_ROWS * view.row),
  ArrowDown: () => scrollRows(view.top + FEW_ROWS * view.row),
  PageUp: () => scrollRows(view.top - $("timeline").clientHeight),
  PageDown: () => scrollRows(view.top + $("timeline").clientHeight),
};

export function listenToControls() {
  for (const [id, act] of Object.entries(buttons)) $(id).onclick = act;
  document.onkeydown = pressed;
  $("query").oninput = () => find($("query").value);
  $("query").onkeydown = ({ key }) => {
    if (key === "Enter") $("found").querySelector("button")?.click();
    if (key === "Escape") $("query").blur();
  };
  document.querySelector("aside").onclick = ({ target }) => {
    const { sample, turn } = target.closest("button")?.dataset ?? {};
    if (sample !== undefined) choose(Number(sample));
    if (turn !== undefined) go(Number(turn));
  };
  new ResizeObserver(refresh).observe($("plots"));
  matchMedia("(prefers-color-scheme: dark)").onchange = readColors;
  window.onhashchange = restore;
}

function pressed(event) {
  const { id, tagName } = event.target;
  const shift = event.shiftKey && event.key.startsWith("Arrow") ? "Shift" : "";
  const rowsScroll = !$("scroller").hidden && !event.target.closest?.("aside");
  const act = keys[shift + event.key] ?? (rowsScroll ? rowKeys[event.key] : undefined);
  const meantElsewhere = event.ctrlKey || event.metaKey || event.altKey || id === "query";
  // A focused button is pressed by the space bar.
  if (!act || meantElsewhere || (event.key === " " && tagName === "BUTTON")) return;
  event.preventDefault();
  act();
}

// The rows of the sequences: how tall they are, and which of them can be seen.
//
// Few rows share the panel. Of many, each stays tall enough to be read, and the panel
// scrolls; Shift+wheel and `All rows` make them as low as it takes to see all at once.

import { turnsSeen, view } from "./axis.js";
import { $ } from "./dom.js";
import { clamp, count } from "./format.js";
import { lanes } from "./lanes.js";
import { lives } from "./lives.js";
import { refresh } from "./redraw.js";

const READABLE = 9; // pixels of a row that can be read
const ROOMY = 22;

let barAt = 0; // where the scroll bar was put
export let rows = 1; // how many have anybody in the part of the run that is seen

export function isSeen(s, { first, last }) {
  return lives[s].died >= first && lives[s].born <= last;
}

// Fit the rows into `height` pixels.
export function measureRows(height) {
  const seen = turnsSeen();
  rows = lanes.findLastIndex((row) => row.some((s) => isSeen(s, seen))) + 1 || 1;
  const all = height / rows; // as tall as they are if all are to be seen
  const usual = clamp(READABLE, all, ROOMY);
  view.row = Math.max(Math.min(all, usual), usual * view.tall);
  view.tall = view.row / usual;
  view.top = clamp(0, view.top, Math.max(0, rows * view.row - height));
  showScroller(height, all);
}

function showScroller(height, all) {
  const overflows = rows * view.row > height + 1;
  const from = Math.floor(view.top / view.row) + 1;
  const to = Math.min(rows, Math.ceil((view.top + height) / view.row));
  $("rows-shown").textContent = overflows
    ? `${count(from)}–${count(to)} of ${count(rows)} rows`
    : `${count(rows)} ${rows === 1 ? "row" : "rows"}`;
  $("all-rows").hidden = all >= READABLE;
  $("all-rows").setAttribute("aria-pressed", !overflows);
  const scroller = $("scroller");
  scroller.hidden = !overflows;
  $("scrolled").style.height = `${rows * view.row}px`;
  if (Math.abs(scroller.scrollTop - view.top) >= 1) scroller.scrollTop = view.top;
  barAt = scroller.scrollTop;
}

// The bar was moved. A browser says so of moves made here as well, and says it late, when
// the rows may have gone on.
export function followScroller() {
  const { scrollTop } = $("scroller");
  if (scrollTop !== barAt) scrollRows(scrollTop);
}

export function scrollRows(top) {
  view.top = Math.max(0, top);
  refresh();
}

// All rows at once, or rows that can be read.
export function toggleAllRows() {
  view.tall = $("all-rows").getAttribute("aria-pressed") === "true" ? 1 : 0;
  refresh();
}

// The sample at a place of the panel, in its pixels, or -1.
export function sampleAt(t, y) {
  const row = lanes[Math.floor((y + view.top) / view.row)] ?? [];
  return row.findLast((s) => lives[s].born <= t && lives[s].died >= t) ?? -1;
}

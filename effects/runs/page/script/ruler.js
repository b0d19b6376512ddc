// The ruler: what the clock says along the axis, where it jumps, and the marks of what
// went wrong.

import { GUTTER, byTurn, edge, px, secondsAt, spot, view, wide } from "./axis.js";
import { color, drawPauses, pausesSeen, surface } from "./canvas.js";
import { count, tickLabel } from "./format.js";
import { marks } from "./lives.js";
import { kind, log, run } from "./run.js";

const APART = 80; // pixels, at least, from one mark to the next, or on narrow screens:
const MARKS = 5;
// Seconds from one mark to the next that a person can count in.
const CLOCKS = [15, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 86400];

export function drawRuler() {
  const on = surface("ruler");
  on.g.fillText(byTurn() ? "turn" : "time", GUTTER - 6, on.h - 7);
  on.g.textAlign = "left";
  drawPauses(on, view);
  const taken = drawLengths(on);
  const tick = tickSize();
  for (const stretch of stretches()) drawTicks(on, stretch, tick, taken);
  drawMarks(on.g);
}

// From one mark to the next, in seconds or turns.
function tickSize() {
  const least = ((view.to - view.from) / wide) * Math.min(APART, wide / MARKS);
  const ten = 10 ** Math.floor(Math.log10(least));
  const nice = !byTurn() && least > 10 ? CLOCKS : [1, 2, 5, 10].map((n) => n * ten);
  return Math.max(nice.find((size) => size >= least) ?? least, byTurn() ? 1 : 0);
}

// What is seen of the axis, from pause to pause.
function stretches() {
  const found = [];
  let from = view.from;
  for (const pause of pausesSeen(view)) {
    if (edge[pause.from] > from) found.push({ from, to: edge[pause.from] });
    from = edge[pause.until];
  }
  if (from < view.to) found.push({ from, to: view.to });
  return found;
}

// How long each pause is, where there is room for it; returns the places of these words.
function drawLengths({ g, h }) {
  const taken = [];
  for (const { left, right, length } of pausesSeen(view)) {
    const words = `${lengthInWords(length)} cut`;
    const width = g.measureText(words).width;
    const x = Math.min((left + right - width) / 2, GUTTER + wide - width);
    write(g, { words, x, y: h - 7, taken, background: color.panel });
  }
  return taken;
}

function lengthInWords(seconds) {
  if (seconds < 120) return `${Math.floor(seconds)} s`;
  return seconds < 7200
    ? `${Math.floor(seconds / 60)} min`
    : `${Math.floor(seconds / 3600)} h`;
}

function drawTicks({ g, h }, { from, to }, tick, taken) {
  // Within a stretch a second of the axis is a second of the clock.
  const shown = byTurn() ? from + run.first : secondsAt(from);
  for (let n = Math.ceil(shown / tick - 1e-9); n * tick <= shown + to - from; n++) {
    const x = spot(from + n * tick - shown);
    g.fillStyle = color.soft;
    g.fillRect(x, h - 6, 1, 6);
    const words = byTurn() ? count(n * tick) : tickLabel(n * tick, tick);
    write(g, { words, x: x + 4, y: h - 7, taken });
  }
}

// Write words, unless others are there already or the ruler ends.
function write(g, { words, x, y, taken, background }) {
  const right = x + g.measureText(words).width;
  const covered = taken.some(([from, to]) => x < to + 4 && right > from - 4);
  if (covered || right >= GUTTER + wide + 1) return;
  taken.push([x, right]);
  if (background) {
    g.fillStyle = background;
    g.fillRect(x - 2, y - 10, right - x + 4, 14);
  }
  g.fillStyle = color.soft;
  g.fillText(words, x, y);
}

function drawMarks(g) {
  for (const i of marks) {
    const x = px(log.turn[i]);
    g.fillStyle = log.kind[i] === kind.Discarded ? color.wrong : color.again;
    if (x >= GUTTER) g.fillRect(x - 1, 0, 2, 6);
  }
}

// The axis that all panels share: time with pauses cut, time as it went, or turns.

import { $ } from "./dom.js";
import { clamp } from "./format.js";
import { findPauses, pauses, seconds, withoutPauses } from "./pauses.js";
import { refresh } from "./redraw.js";
import { turns } from "./run.js";

// In CSS pixels: left and right of the plots, and a panel's own padding and border.
export const GUTTER = 56;
const RIGHT = 14;
export const PAD = 9;

const LEAST_TURNS = 6; // that can be seen at once

let edges; // of each axis: where every turn begins
export let edge; // of the one that is shown
export let wide = 100; // of the plots, in CSS pixels
// What is seen of the axis, and of the rows: the height of one, as a multiple of the
// usual and in pixels, and how far they are scrolled.
export const view = { from: 0, to: 1, tall: 1, row: 1, top: 0 };

export function measureAxes() {
  findPauses();
  edges = {
    time: withoutPauses(),
    clock: seconds,
    turn: Float64Array.from({ length: turns + 1 }, (_, t) => t),
  };
}

export function measureWidth() {
  wide = Math.max(10, Math.floor($("overview").clientWidth - GUTTER - RIGHT));
}

export const byTurn = () => edge === edges.turn;
export const cutPauses = () => edge === edges.time;
export const axisName = () => Object.keys(edges).find((name) => edges[name] === edge);

export function spot(value) {
  return GUTTER + ((value - view.from) / (view.to - view.from)) * wide;
}

export function px(t) {
  return spot(edge[t]);
}

export function valueAt(x) {
  return view.from + ((x - GUTTER) / wide) * (view.to - view.from);
}

// The last turn that begins at or before a place on the axis.
export function turnAt(value) {
  let low = 0;
  let high = turns - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (edge[middle] <= value) low = middle;
    else high = middle - 1;
  }
  return low;
}

// What the clock says at a place on the axis.
export function secondsAt(value) {
  const t = turnAt(value);
  const share = (value - edge[t]) / (edge[t + 1] - edge[t] || 1);
  return seconds[t] + clamp(0, share, 1) * (seconds[t + 1] - seconds[t]);
}

// Turns as they are seen: the first one, and one after the last.
export function turnsSeen() {
  return { first: turnAt(view.from), last: Math.min(turns, turnAt(view.to) + 1) };
}

// Show this part of the axis, as far as it exists.
export function look(from, to) {
  const end = edge[turns];
  const span = clamp(Math.min(end, (end / turns) * LEAST_TURNS), to - from, end);
  view.from = clamp(0, (from + to - span) / 2, end - span);
  view.to = view.from + span;
  refresh();
}

export function zoom(factor, place) {
  look(place - (place - view.from) * factor, place + (view.to - place) * factor);
}

// Show another axis, and the same turns on it.
export function axis(name) {
  const { first, last } = edge ? turnsSeen() : { first: 0, last: turns };
  const known = Object.hasOwn(edges, name) ? name : "time";
  edge = edges[seconds[turns - 1] > 0 ? known : "turn"];
  $("by-turn").setAttribute("aria-pressed", byTurn());
  $("by-time").setAttribute("aria-pressed", !byTurn());
  $("cut-pauses").setAttribute("aria-pressed", cutPauses());
  $("cut-pauses").hidden = byTurn() || !pauses.length;
  look(edge[first], edge[last]);
}

// Pauses: time in which no request ran or waited.
//
// A server that answers for a minute and then has nothing to do for an hour is drawn as
// that minute, with a marked break. A time in which anybody runs or waits is never cut.

import { turn, turns } from "./run.js";

const LEAST_PAUSE = 1; // seconds; what is shorter is no pause
// A break is this share of the time in which something ran, and all together are at most
// the other share of it.
const BREAK = 0.03;
const BREAKS = 0.25;

// When each turn begins, in seconds since the first; the last one's end is made up: it is
// as long as a turn usually is.
export let seconds;
// The pauses that are cut: from turn `from` to turn `until`, `length` seconds long.
export const pauses = [];

let width = 0; // of a break, in seconds of the axis

export function findPauses() {
  seconds = new Float64Array(turns + 1);
  for (let t = 0; t < turns; t++) seconds[t] = turn.time[t] / 1e6;

  const last = seconds[turns - 1];
  const found = idle().filter(({ length }) => length >= LEAST_PAUSE);
  const busy = last - found.reduce((sum, { length }) => sum + length, 0);
  seconds[turns] = last + (busy / turns || 1e-3);

  width = busy * Math.min(BREAK, BREAKS / found.length);
  if (width > 0) pauses.push(...found.filter(({ length }) => length > width));
}

// The longest stretches of turns after each of which no request is there.
function idle() {
  const found = [];
  for (let t = 0; t < turns; t++) {
    const from = t;
    while (t < turns - 1 && !turn.running[t] && !turn.waiting[t]) t++;
    if (t > from) found.push({ from, until: t, length: seconds[t] - seconds[from] });
  }
  return found;
}

// When each turn begins on an axis on which each pause is as wide as a break.
export function withoutPauses() {
  const axis = seconds.slice();
  let saved = 0;
  let t = 0;
  for (const { from, until, length } of pauses) {
    for (; t <= from; t++) axis[t] = seconds[t] - saved;
    for (; t < until; t++) {
      axis[t] = axis[from] + ((seconds[t] - seconds[from]) * width) / length;
    }
    saved += length - width;
  }
  for (; t <= turns; t++) axis[t] = seconds[t] - saved;
  return axis;
}

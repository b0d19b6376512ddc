// Names in the bars, numbers of rows beside them, and where chunks of prompts end. Where
// rows are low, only some have a name or a number.

import { GUTTER, px, view, wide } from "./axis.js";
import { color, font } from "./canvas.js";
import { clamp, count } from "./format.js";
import { lanes } from "./lanes.js";
import { lives, segments } from "./lives.js";
import { isSeen, rows } from "./rows.js";
import { brief, kind, log } from "./run.js";

const LEAST_ROW = 5; // pixels; names over lower rows would hide more than they tell
const NAME = 9; // pixels that a name needs
const NARROW = 16; // pixels; a bar that is no wider has no name
const BESIDE = 4; // pixels from the end of a bar to a name in it
const MARK = 2; // pixels, of a draft
const MARKED_ROW = 9; // pixels of a row that has room for marks
const NUMBER = 24; // pixels from one number of a row to the next
const NAME_LETTERS = [18, 13, 9]; // of a name, the most that there is room for

export function drawLabels({ g, h }, seen) {
  const first = Math.max(0, Math.floor(view.top / view.row));
  const last = Math.min(rows, Math.ceil((view.top + h) / view.row));
  numberRows(g, first, last);
  if (view.row < LEAST_ROW) return;
  const every = Math.ceil(NAME / view.row);
  for (let lane = first; lane < last; lane++) {
    for (const s of lanes[lane]) {
      if (!isSeen(s, seen)) continue;
      if (px(lives[s].died) - px(lives[s].born) < NARROW) continue;
      drawChunks(g, s, seen);
      drawDrafts(g, s, seen);
      if (lane % every === 0) drawName(g, s);
    }
  }
}

// The widest part of a bar that can be seen and is of one color: a name hides least
// there.
function roomIn(s) {
  let room = { left: 0, width: 0 };
  for (const { from, until } of segments(lives[s])) {
    const left = Math.max(GUTTER, px(from));
    const width = Math.min(GUTTER + wide, px(until)) - left;
    if (width > room.width) room = { left, width };
  }
  return room;
}

// How many rows one number is for.
function numberedEvery() {
  const sizes = [1, 2, 5, 10, 20, 50, 100, 200, 500];
  return sizes.find((size) => size * view.row >= NUMBER) ?? 1000;
}

function numberRows(g, first, last) {
  const every = numberedEvery();
  g.fillStyle = color.soft;
  for (let number = first + 1; number <= last; number++) {
    const y = (number - 0.5) * view.row - view.top + 4;
    if (number % every === 0) g.fillText(count(number), GUTTER - 6, y);
  }
}

function drawChunks(g, s, { first, last }) {
  const y = lives[s].lane * view.row - view.top;
  g.fillStyle = color.panel;
  for (const i of lives[s].notes) {
    const t = log.turn[i];
    if (log.kind[i] !== kind.Chunk || t < first || t >= last) continue;
    const right = px(t + 1);
    if (right > GUTTER && right - px(t) > 4) g.fillRect(right - 1, y, 1, view.row - 2);
  }
}

// A mark for each draft at the foot of its turn, from left to right: those accepted,
// then those that fell. Where not all have room there are none: some would mislead.
function drawDrafts(g, s, { first, last }) {
  const foot = (lives[s].lane + 1) * view.row - view.top - 2 - MARK - 1;
  if (view.row < MARKED_ROW) return;
  for (const [t, { proposed, accepted }] of lives[s].drafts) {
    if (t < first || t > last) continue;
    const left = px(t) + 1;
    if (px(t + 1) - left < proposed * (MARK + 1)) continue;
    for (let place = 0; place < proposed; place++) {
      const x = left + place * (MARK + 1);
      if (x < GUTTER) continue;
      g.fillStyle = place < accepted ? color.end : color.draft;
      g.fillRect(x, foot, MARK, MARK);
    }
  }
}

function drawName(g, s) {
  const { left, width } = roomIn(s);
  if (width < NARROW) return;
  g.font = font(clamp(9, Math.floor(view.row - 1), 11));
  const name = NAME_LETTERS.map((most) => brief(s, most)).find(
    (one) => g.measureText(one).width <= width - 2 * BESIDE,
  );
  if (name === undefined) return;
  const y = (lives[s].lane + 0.5) * view.row - view.top + 3;
  g.textAlign = "left";
  g.lineWidth = 2.5;
  g.strokeStyle = color.panel;
  g.fillStyle = color.ink;
  g.strokeText(name, left + BESIDE, y);
  g.fillText(name, left + BESIDE, y);
}

// What follows from the log: the state of each sample, from when to when.

import { draft, kind, log, sample, samples, step, text, turn, turns } from "./run.js";

export const WAIT = 1;
const DECODE = 2;
export const HIT = 3; // the cached share of a prefill
const FILL = 4;
export const AGAIN = 5; // preempted, waits
export const END = 6;
const CANCELLED = 7;
const WRONG = 8;

// The color of each state, by its number; 0 is nothing.
export const PALETTE = [
  "panel",
  "waiting",
  "decode",
  "hit",
  "fill",
  "again",
  "end",
  "cancelled",
  "wrong",
];

// By sample: when it came and ended, its entries of the log, the results of its drafts by
// the turn before the one that has them, as their step ran between the two, and its
// segments, as first turn, state and cached share of each, in one array.
export const lives = [];
export const held = []; // entries with the cause for which the head of the queue waits
export const marks = []; // entries shown in the ruler: preemptions, failed steps
export const decided = []; // turns in which something out of the ordinary was decided
export let logAt; // of a turn: its first entry of the log
export let stepAt; // of a turn: its first step

const SEGMENT = 3; // cells
let doneAt; // step -> the turn in which its results came

export function build() {
  doneAt = new Map();
  turn.done.forEach((number, t) => doneAt.set(number, t));
  for (let s = 0; s < samples; s++) {
    const drafts = new Map();
    lives.push({ segs: [], notes: [], drafts, born: 0, died: turns, first: -1, end: -1 });
  }
  draft.turn.forEach((t, i) => {
    const [proposed, accepted] = [draft.proposed[i], draft.accepted[i]];
    lives[draft.sample[i]]?.drafts.set(t - 1, { proposed, accepted });
  });
  const quiet = [kind.Submit, kind.Chunk, kind.Present];
  log.turn.forEach((t, i) => {
    const what = log.kind[i];
    if (!quiet.includes(what) && decided.at(-1) !== t) decided.push(t);
    if (what === kind.Preempted || what === kind.Discarded) marks.push(i);
    if (what === kind.QueueBlocked) held.push(i);
    if (what === kind.Discarded) lives.forEach((life) => unpromise(life, t));
    if (lives[log.sample[i]]) heed(lives[log.sample[i]], i);
  });
  logAt = starts(log.turn);
  stepAt = starts(step.turn);
}

function starts(column) {
  const first = new Int32Array(turns + 1);
  for (const t of column) first[t + 1]++;
  for (let t = 0; t < turns; t++) first[t + 1] += first[t];
  return first;
}

// A first token that a step in flight was to bring is lost with the step, or with the
// sequence's place in it.
function unpromise(life, t) {
  if (life.first >= t) life.first = -1;
}

function heed(life, i) {
  const t = log.turn[i];
  const what = log.kind[i];
  if (what !== kind.Chunk && life.first > t) life.first = -1;
  life.notes.push(i);
  switch (what) {
    case kind.Present:
      return enter(life, t, [WAIT, FILL, DECODE, AGAIN][log.a[i]]);
    case kind.Submit:
      life.born = t;
      return enter(life, t, WAIT);
    case kind.Admitted:
      return enter(life, t, FILL, (log.a[i] + log.c[i]) / log.b[i]);
    case kind.Preempted:
      return enter(life, t, AGAIN);
    case kind.Finished:
      life.died = t;
      life.end = i;
      return undefined;
    case kind.Chunk:
      return heedChunk(life, t, log.a[i], log.c[i]);
    default:
      return undefined;
  }
}

function heedChunk(life, t, number, isLast) {
  const state = life.segs.at(1 - SEGMENT);
  if (state === WAIT || state === AGAIN) return; // planned, then preempted in the turn
  if (state !== FILL) enter(life, t, FILL);
  if (isLast) {
    enter(life, t + 1, DECODE);
    if (life.first < 0) life.first = doneAt.get(number) ?? -1;
  }
}

function enter(life, t, state, share = 0) {
  while (life.segs.at(-SEGMENT) > t) life.segs.length -= SEGMENT;
  life.segs.push(t, state, share);
}

// The segments of a life, one after the other.
export function segments({ segs, died }) {
  const found = [];
  for (let n = 0; n < segs.length; n += SEGMENT) {
    const until = Math.min(died, segs[n + SEGMENT] ?? turns);
    found.push({ from: segs[n], until, state: segs[n + 1], share: segs[n + 2] });
  }
  return found;
}

export function stateAt(s, t) {
  const life = lives[s];
  if (!life || t < life.born || t >= life.died) return 0;
  const last = life.segs.findLastIndex((from, n) => n % SEGMENT === 0 && from <= t);
  return life.segs[last + 1];
}

// What became of the drafts of a sample that ran after a turn; undefined if there were
// none.
export function draftsAt(s, t) {
  return lives[s]?.drafts.get(t);
}

export function draftsIn(some) {
  const all = [...some];
  const sum = (of) => all.reduce((before, one) => before + of(one), 0);
  const [proposed, accepted] = [sum((one) => one.proposed), sum((one) => one.accepted)];
  return all.length ? { steps: all.length, proposed, accepted } : undefined;
}

// Of all samples, as the results say that came in a turn.
export function draftsOf(t) {
  return draftsIn(lives.map(({ drafts }) => drafts.get(t - 1)).filter(Boolean));
}

// Of a whole run.
export function allDrafts() {
  return draftsIn(lives.flatMap(({ drafts }) => [...drafts.values()]));
}

export function waits(s, t) {
  return [WAIT, AGAIN].includes(stateAt(s, t));
}

// The last cause for which the head of the queue was blocked, if it still waits.
export function front(t) {
  const i = held.findLast((one) => log.turn[one] <= t);
  return i !== undefined && waits(log.sample[i], t) ? [i] : [];
}

// Whether a sample came in the recording; else it was there as that began.
export function came(s) {
  return log.kind[lives[s]?.notes[0]] === kind.Submit;
}

// How a sample ended, as a state; 0 if it did not.
export function ended(s) {
  if (lives[s].end < 0) return 0;
  const why = text(log.a[lives[s].end]);
  if (why === "cancelled") return CANCELLED;
  return why === "error" || why === "rejected" ? WRONG : why && END;
}

// Going to a turn or a sequence, and the address, which says what is shown so that it can
// be sent to somebody.

import { axis, axisName, edge, look, view } from "./axis.js";
import { $ } from "./dom.js";
import { clamp } from "./format.js";
import { held, lives, marks } from "./lives.js";
import { drawOverlay } from "./overlay.js";
import { due, refresh } from "./redraw.js";
import { log, run, sample, text, turns } from "./run.js";
import { chosen, cursor, moveCursor, setChosen } from "./selection.js";
import { showStory } from "./story_panel.js";
import { showTurn } from "./turn_panel.js";

const AROUND = 0.15; // around a sequence that is gone to
const SAVED = 250; // milliseconds after the last move

let saving = 0;

export function go(t, follow = true) {
  moveCursor(clamp(0, t, turns - 1));
  const value = edge[cursor];
  const half = (view.to - view.from) / 2;
  const after = edge[cursor + 1] > view.to + half * 1e-9;
  if (follow && (value < view.from || after)) look(value - half, value + half);
  if (!due) drawOverlay();
  showTurn();
  clearTimeout(saving);
  saving = setTimeout(save, SAVED);
}

export function choose(s, move = false) {
  setChosen(s);
  showStory();
  document.querySelector("aside").scrollTop = 0;
  if (s >= 0 && move) {
    const from = edge[lives[s].born];
    const to = edge[lives[s].died];
    const margin = Math.max((to - from) * AROUND, (edge[turns] / turns) * 4);
    look(from - margin, to + margin);
    go(lives[s].born);
  }
  if (s >= 0) showRow(lives[s].lane);
  refresh();
  save();
}

// Scroll to a row, if it is out of sight.
function showRow(lane) {
  const height = $("timeline").clientHeight;
  const y = lane * view.row - view.top;
  if (y + view.row <= 0 || y >= height) view.top = lane * view.row - height / 2;
}

export function save() {
  const params = new URLSearchParams({
    turn: cursor + run.first,
    from: view.from.toPrecision(9),
    to: view.to.toPrecision(9),
    axis: axisName(),
  });
  if (chosen >= 0) {
    params.set("request", text(sample.id[chosen]));
    params.set("sample", sample.sample[chosen]);
  }
  // In a frame, beside another run, there is no address to keep it in.
  if (window.parent === window) {
    history.replaceState(null, "", `#${params}`);
  }
}

export function restore() {
  const params = new URLSearchParams(location.hash.slice(1));
  const number = (key, usual) =>
    params.get(key) && Number.isFinite(+params.get(key)) ? +params.get(key) : usual;
  axis(params.get("axis") ?? "time");
  look(number("from", 0), number("to", edge[turns]));
  const found = lives.findLastIndex(
    (_, s) =>
      text(sample.id[s]) === params.get("request") &&
      sample.sample[s] === number("sample", 0),
  );
  choose(found, !params.has("from"));
  const eventful = lives[found]?.born ?? firstOfInterest();
  go(Math.round(number("turn", eventful + run.first)) - run.first, !params.has("from"));
}

// A turn to begin with, in which something can be seen.
function firstOfInterest() {
  return log.turn[marks[0] ?? held[held.length >> 1]] ?? 0;
}

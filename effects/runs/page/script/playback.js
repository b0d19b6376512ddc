// Playing the run.

import { edge, turnAt, view } from "./axis.js";
import { $ } from "./dom.js";
import { go } from "./navigation.js";
import { turns } from "./run.js";
import { cursor } from "./selection.js";

const SCREENFUL = 15; // seconds

let playing = 0; // when it was started; 0: it is not

export function play(on = !playing) {
  let place = edge[cursor];
  let before = performance.now();
  const mine = on ? before : 0;
  playing = mine;
  $("play").setAttribute("aria-pressed", on);
  $("play").textContent = on ? "❚❚ Pause" : "▶ Play";

  function tick(now) {
    if (!on || playing !== mine) return;
    const gone = Math.max(0, now - before) / 1000;
    place = Math.max(place, edge[cursor]) + ((view.to - view.from) / SCREENFUL) * gone;
    before = now;
    if (turnAt(place) !== cursor) go(turnAt(place));
    if (place < edge[turns]) requestAnimationFrame(tick);
    else play(false);
  }
  requestAnimationFrame(tick);
}

// The text at the pointer.

import { GUTTER, turnAt, valueAt, view } from "./axis.js";
import { pausesSeen } from "./canvas.js";
import { $ } from "./dom.js";
import { clock, count } from "./format.js";
import { draftsAt, stateAt } from "./lives.js";
import { seconds } from "./pauses.js";
import { sampleAt } from "./rows.js";
import { brief, run } from "./run.js";
import { draftsInWords } from "./sentences.js";

const TIP_LETTERS = 200; // of an id: a tip is where all of it can be read
const DOING = ["ends", "waits", "writes", "", "reads its prompt", "waits again"];

// The sample at a place of the timeline, in its pixels, or -1.
export function under(x, y) {
  return x < GUTTER || pauseAt(x) ? -1 : sampleAt(turnAt(valueAt(x)), y);
}

function pauseAt(x) {
  return pausesSeen(view).find(({ left, right }) => left <= x && x < right);
}

export function tip({ offsetX, offsetY, clientX, clientY }) {
  const words = inWords(offsetX, offsetY);
  const box = $("tip");
  box.hidden = !words;
  box.textContent = words;
  const right = innerWidth - box.offsetWidth - 8;
  const below = clientY + 16;
  const above = clientY - 8 - box.offsetHeight;
  const top = below + box.offsetHeight < innerHeight ? below : above;
  box.style.left = `${Math.max(0, Math.min(clientX + 14, right))}px`;
  box.style.top = `${Math.max(0, top)}px`;
}

export function hideTip() {
  $("tip").hidden = true;
}

function inWords(x, y) {
  const s = under(x, y);
  const t = turnAt(valueAt(x));
  if (s >= 0) {
    const when = `turn ${count(t + run.first)}, ${clock(seconds[t])}`;
    const drafts = draftsAt(s, t);
    const also = drafts ? ` · ${draftsInWords(drafts)}` : "";
    return `request ${brief(s, TIP_LETTERS)} ${DOING[stateAt(s, t)]}${also} · ${when}`;
  }
  const pause = pauseAt(x);
  if (!pause) return "";
  return `no request runs or waits for ${clock(pause.length)}: cut short here`;
}

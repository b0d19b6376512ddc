// What lies over all panels: the chosen turn, the frame in the whole run, and
// the sequence that is chosen.

import { GUTTER, PAD, edge, px, view, wide } from "./axis.js";
import { color, surface } from "./canvas.js";
import { $ } from "./dom.js";
import { lives } from "./lives.js";
import { turns } from "./run.js";
import { chosen, cursor } from "./selection.js";

const LEFT = PAD + GUTTER;
const PALE = 0.13;

export function drawOverlay() {
  const { g } = surface("overlay");
  g.fillStyle = color.ink;
  g.strokeStyle = color.ink;
  g.lineWidth = 2;
  const pale = [...drawFrame(g), ...drawCursor(g)];
  if (chosen >= 0) drawChosen(g);
  g.globalAlpha = PALE;
  for (const { x, y, width, height } of pale) g.fillRect(x, y, width, height);
}

// Each of these returns what is to be pale.
function drawFrame(g) {
  const { offsetTop: y, clientHeight: height } = $("overview");
  const whole = (value) => LEFT + (value / edge[turns]) * wide;
  const from = whole(view.from);
  const to = whole(view.to);
  g.strokeRect(from, y, Math.max(3, to - from), height);
  g.fillRect(whole(edge[cursor]), y, 1, height);
  return [
    { x: LEFT, y, width: from - LEFT, height },
    { x: to, y, width: LEFT + wide - to, height },
  ];
}

function drawCursor(g) {
  const pale = [];
  const x = PAD + px(cursor);
  const next = Math.min(LEFT + wide, PAD + px(cursor + 1));
  if (x < LEFT - 1 || x > LEFT + wide) return pale;
  for (const { offsetTop: y, clientHeight: height } of [
    "ruler",
    "timeline",
    "pool",
    "batch",
  ].map($)) {
    g.fillRect(x - 0.75, y, 1.5, height);
    if (next - x > 2) pale.push({ x, y, width: next - x, height });
  }
  g.fill(new Path2D(`M${x - 6} ${$("ruler").offsetTop} h12 l-6 9 z`));
  return pale;
}

function drawChosen(g) {
  const { lane, born, died } = lives[chosen];
  const { offsetTop, clientHeight } = $("timeline");
  const y = lane * view.row - view.top;
  const from = Math.max(LEFT, PAD + px(born));
  const to = Math.min(LEFT + wide, PAD + px(died));
  if (y <= -9 || y >= clientHeight || to <= from - 4) return;
  const width = Math.max(4, to - from + 4);
  g.save();
  g.beginPath();
  g.rect(from - 3, offsetTop - 3, width + 2, clientHeight + 6);
  g.clip(); // a row at the edge of the panel is seen in part
  g.strokeRect(from - 2, offsetTop + y - 2, width, Math.max(4, view.row + 2));
  g.restore();
}

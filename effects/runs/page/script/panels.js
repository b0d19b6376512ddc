// The panels of columns: the whole run, the block pool, the batch.
// Their axes end a little above what was used, not at what is allowed, which may be
// hundreds of times as much.

import { GUTTER, axisName, edge, view, wide } from "./axis.js";
import {
  POOL,
  axisEnd,
  byPixel,
  color,
  drawColumns,
  drawPauses,
  level,
  surface,
} from "./canvas.js";
import { count } from "./format.js";
import { stepAt } from "./lives.js";
import { run, step, turn, turns } from "./run.js";

const ABOVE = 6; // pixels above the tallest column of the batch
const UPPER = 0.66; // the share of the batch's panel that shows tokens

// The most that there ever was of each, and where the axis of it ends.
export const used = {};

export function measureUse() {
  const most = (value, length) => {
    let top = 0;
    for (let at = 0; at < length; at++) top = Math.max(top, value(at));
    return top;
  };
  const steps = step.number.length;
  used.crowd = Math.max(
    1,
    most((t) => turn.running[t] + turn.waiting[t], turns),
  );
  used.blocks = most((t) => run.num_blocks - turn.free[t], turns);
  const inputs = (k) => step.decode[k] + step.drafts[k] + step.prefill[k];
  used.tokens = most(inputs, steps);
  used.decode = Math.max(
    1,
    most((k) => step.decode[k], steps),
  );
  used.blocksEnd = axisEnd(used.blocks, run.num_blocks);
  used.tokensEnd = axisEnd(used.tokens, run.max_num_batched_tokens);
}

// What the whole run looks like changes with the axis, the colors and the width alone.
let overviewOf = "";

export function drawOverview() {
  const now = [axisName(), color.panel, wide].join();
  if (overviewOf === now) return;
  overviewOf = now;
  const on = surface("overview");
  const whole = { from: 0, to: edge[turns] };
  drawStack(on, whole, ["running", "waiting"], ["decode", "waiting"], used.crowd);
  labels(on, [
    [used.crowd, 9],
    [0, on.h - 1],
  ]);
  drawPauses(on, whole);
}

export function drawPool() {
  const on = surface("pool");
  const end = used.blocksEnd;
  on.g.fillStyle = color.free;
  on.g.fillRect(GUTTER, 0, wide, on.h);
  drawStack(on, view, POOL.slice(0, 3), POOL, end);
  const top = end < run.num_blocks ? used.blocks : run.num_blocks;
  labels(on, [
    [top, Math.max(9, on.h * (1 - top / end) + 4)],
    [0, on.h - 1],
  ]);
  drawPauses(on, view);
}

// Columns of a turn on top of each other, whose sum reaches the top at `end`.
function drawStack({ g, h }, span, names, colors, end) {
  const base = level(h);
  const { means } = byPixel(
    span,
    (t) => t,
    names.map((name) => turn[name]),
  );
  means.forEach((values, n) => {
    drawColumns(g, { base, values, scale: h / end, name: colors[n] });
  });
}

// Up: the tokens of a step. Down: how many sequences write one.
export function drawBatch() {
  const on = surface("batch");
  const { g, h } = on;
  const floor = Math.round(h * UPPER);
  const up = (floor - ABOVE) / used.tokensEnd;
  const columns = [step.decode, step.drafts, step.prefill];
  const { means, peak } = byPixel(view, (t) => stepAt[t], columns);
  const [decode, drafts, prefill] = means;
  const base = level(floor);

  g.globalAlpha = 0.3;
  drawColumns(g, { base: level(floor), values: peak, scale: up, name: "fill" });
  g.globalAlpha = 1;
  drawColumns(g, { base, values: decode, scale: up, name: "decode" });
  drawColumns(g, { base, values: drafts, scale: up, name: "draft" });
  drawColumns(g, { base, values: prefill, scale: up, name: "fill" });

  const down = (floor + 2 - h) / used.decode;
  drawColumns(g, { base: level(floor + 2), values: decode, scale: down, name: "decode" });

  const most = run.max_num_batched_tokens;
  const top = used.tokensEnd < most ? used.tokens : most;
  labels(on, [
    [top, floor - top * up + 4],
    [0, floor + 3],
    [used.decode, h - 1],
  ]);
  if (top === most) dashed(g, floor - most * up);
  drawPauses(on, view);
}

function labels({ g }, values) {
  g.fillStyle = color.soft;
  for (const [value, y] of values) g.fillText(count(value), GUTTER - 6, y);
}

function dashed(g, y) {
  g.save();
  g.strokeStyle = color.wrong;
  g.setLineDash([5, 4]);
  g.strokeRect(GUTTER, y, wide, 0);
  g.restore();
}

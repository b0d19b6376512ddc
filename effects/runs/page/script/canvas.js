// What the panels are drawn with.

import { GUTTER, cutPauses, edge, turnAt, wide } from "./axis.js";
import { $, root } from "./dom.js";
import { PALETTE } from "./lives.js";
import { pauses } from "./pauses.js";
import { refresh } from "./redraw.js";
import { turns } from "./run.js";

export const POOL = ["private", "shareable", "cached", "free"]; // blocks, from the bottom
export const color = {}; // by name; the style sheet has them

const FONT = "system-ui, 'DejaVu Sans', sans-serif";
const HATCH = 6; // pixels between the lines over a pause
const HEADROOM = 1.08; // of an axis, above what was used
const NEAR = 0.85; // an axis that would end near what is allowed ends there

export function readColors() {
  const style = getComputedStyle(root);
  for (const name of [...PALETTE, ...POOL, "draft", "ink", "soft"]) {
    color[name] = style.getPropertyValue(`--${name}`).trim();
  }
  refresh();
}

// A canvas made ready to draw on, in CSS pixels; what was on it is gone.
export function surface(id) {
  const canvas = $(id);
  const dpr = window.devicePixelRatio || 1;
  const g = canvas.getContext("2d");
  canvas.width = Math.round(canvas.clientWidth * dpr);
  canvas.height = Math.round(canvas.clientHeight * dpr);
  g.scale(dpr, dpr);
  g.font = font(11);
  g.textAlign = "right";
  g.fillStyle = color.soft;
  return { canvas, g, dpr, h: canvas.clientHeight };
}

export function font(size) {
  return `${size}px ${FONT}`;
}

// Where an axis ends that has to show `used` of what is `allowed`: a little above it.
export function axisEnd(used, allowed) {
  const end = Math.max(1, used * HEADROOM);
  return end < NEAR * allowed ? end : allowed;
}

// Means and peaks by pixel, over the part of the axis that it stands for. `first` says
// where the values of a turn start in the columns; a turn that has none counts as zeros.
export function byPixel(span, first, columns) {
  const make = () => new Float64Array(wide);
  const means = columns.map(make);
  const weight = make();
  const peak = make();
  const scale = wide / (span.to - span.from);
  const last = Math.min(turns, turnAt(span.to) + 1);
  for (let t = turnAt(span.from); t < last; t++) {
    const start = first(t);
    const some = first(t + 1) - start;
    const parts = Math.max(1, some);
    const x = (edge[t] - span.from) * scale;
    const width = ((edge[t + 1] - edge[t]) * scale) / parts;
    for (let j = 0; j < parts; j++) {
      const left = Math.max(0, x + j * width);
      const right = Math.min(wide, x + (j + 1) * width);
      for (let c = Math.floor(left); c < wide && c <= right; c++) {
        const share = Math.max(0, Math.min(right, c + 1) - Math.max(left, c)) + 1e-9;
        let all = 0;
        weight[c] += share;
        for (let n = 0; n < columns.length && some; n++) {
          means[n][c] += columns[n][start + j] * share;
          all += columns[n][start + j];
        }
        if (all > peak[c]) peak[c] = all;
      }
    }
  }
  for (const mean of means) for (let c = 0; c < wide; c++) mean[c] /= weight[c] || 1;
  return { means, peak };
}

// A baseline, one for each pixel.
export function level(value) {
  return new Float64Array(wide).fill(value);
}

// Draw values as columns on top of `base`, which moves up by them.
export function drawColumns(g, { base, values, scale, name }) {
  g.fillStyle = color[name];
  for (let c = 0; c < wide; c++) {
    const high = values[c] * scale;
    g.fillRect(GUTTER + c, base[c] - high, 1, high);
    base[c] -= high;
  }
}

// The pauses that can be seen in a part of the axis, and where they begin and end.
export function pausesSeen({ from, to }) {
  if (!cutPauses()) return [];
  const scale = wide / (to - from);
  return pauses
    .filter((pause) => edge[pause.until] > from && edge[pause.from] < to)
    .map((pause) => ({
      ...pause,
      left: GUTTER + Math.max(0, (edge[pause.from] - from) * scale),
      right: GUTTER + Math.min(wide, (edge[pause.until] - from) * scale),
    }));
}

// A break in the axis is hatched in every panel.
export function drawPauses({ g, h }, span) {
  const seen = pausesSeen(span);
  if (!seen.length) return;
  g.save();
  for (const { left, right } of seen) {
    const width = Math.max(1, right - left);
    g.globalAlpha = 0.7;
    g.fillStyle = color.panel;
    g.fillRect(left, 0, width, h);
    g.globalAlpha = 0.5;
    g.fillStyle = hatched(g);
    g.fillRect(left, 0, width, h);
    g.globalAlpha = 1;
    g.fillStyle = color.soft;
    g.fillRect(left, 0, 1, h);
    if (width > 3) g.fillRect(right - 1, 0, 1, h);
  }
  g.restore();
}

function hatched(g) {
  const tile = document.createElement("canvas");
  tile.width = HATCH;
  tile.height = HATCH;
  const pen = tile.getContext("2d");
  pen.strokeStyle = color.soft;
  for (const shift of [-HATCH, 0, HATCH]) {
    pen.moveTo(shift - 1, HATCH + 1);
    pen.lineTo(shift + HATCH + 1, -1);
  }
  pen.stroke();
  return g.createPattern(tile, "repeat");
}

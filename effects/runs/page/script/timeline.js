// The bars of the sequences. A pixel shows the state at its centre; what is rare, and may
// be shorter than a pixel, is drawn on top and never left out.

import { GUTTER, px, turnsSeen, view, wide } from "./axis.js";
import { color, drawPauses, surface } from "./canvas.js";
import { drawLabels } from "./labels.js";
import { lanes } from "./lanes.js";
import { AGAIN, END, HIT, PALETTE, WAIT, ended, lives, segments } from "./lives.js";
import { isSeen, measureRows } from "./rows.js";

export function drawTimeline() {
  const on = surface("timeline");
  measureRows(on.h);
  const raster = rasterOf(on);
  const seen = turnsSeen();
  const rare = [];
  lanes.forEach((row, lane) => {
    const band = bandOf(lane, on);
    if (band.y1 < 0 || band.y0 > raster.height) return;
    for (const s of row) if (isSeen(s, seen)) drawLife(raster, s, band, seen, rare);
  });
  for (const box of rare) fill(raster, box);
  on.g.putImageData(imageOf(raster), 0, 0);
  drawPauses(on, view);
  drawLabels(on, seen);
}

// The states of all pixels of a canvas, and the part of it that is the plot.
function rasterOf({ canvas: { width, height }, dpr }) {
  const begin = Math.round(GUTTER * dpr);
  const states = new Uint8Array(width * height);
  return { states, width, height, dpr, begin, end: begin + Math.round(wide * dpr) };
}

// Top and bottom of a row, in pixels of the device; rows with room for it have a gap.
function bandOf(lane, { dpr }) {
  const high = view.row * dpr;
  const y = lane * high - view.top * dpr;
  let gap = 0;
  if (high >= 3) gap = high >= 12 ? 2 * dpr : 1;
  return { high, y0: Math.ceil(y - 0.5), y1: Math.ceil(y + high - 0.5) - gap };
}

function drawLife(raster, s, band, seen, rare) {
  const { dpr } = raster;
  const { y0, y1 } = band;
  const X = (t) => Math.ceil(px(t) * dpr - 0.5);
  for (const { from, until, state, share } of segments(lives[s])) {
    if (until < seen.first || from > Math.min(until, seen.last)) continue;
    const x0 = X(from);
    const x1 = X(until);
    if (state === AGAIN) {
      rare.push({ state, x0, x1: Math.max(x1, x0 + 2), y0, y1: Math.max(y1, y0 + 1) });
    } else {
      fill(raster, { state, x0, x1, y0, y1 });
    }
    if (share)
      fill(raster, { state: HIT, x0, x1, y0: y1 - Math.round(share * (y1 - y0)), y1 });
  }
  const why = ended(s);
  const tail = X(lives[s].died);
  const long = tail - X(lives[s].born) > 9 * dpr;
  if (why > END) {
    rare.push({
      state: why,
      x0: tail - 2 * dpr,
      x1: tail + dpr,
      y0,
      y1: Math.max(y1, y0 + 2),
    });
  }
  if (why === END && band.high >= 5 && long) {
    rare.push({ state: END, x0: tail - 2 * dpr, x1: tail, y0, y1 });
  }
}

function fill({ states, width, height, begin, end }, { state, x0, x1, y0, y1 }) {
  const striped = state === AGAIN && y1 - y0 > 3;
  const left = Math.max(begin, Math.round(x0));
  const right = Math.min(end, Math.round(x1));
  for (let y = Math.max(0, y0); y < Math.min(height, y1); y++) {
    for (let x = left; x < right; x++) {
      states[y * width + x] = striped && ((x + y) >> 2) % 2 ? WAIT : state;
    }
  }
}

function imageOf({ states, width, height }) {
  const image = new ImageData(width, height);
  const out = new Uint32Array(image.data.buffer);
  const palette = PALETTE.map((name) => pixel(parseInt(color[name].slice(1), 16)));
  for (let at = 0; at < out.length; at++) out[at] = states[at] && palette[states[at]];
  return image;
}

// A color as ImageData has it: bytes in the order of red, green, blue and alpha.
function pixel(rgb) {
  const red = rgb >> 16;
  const green = rgb & 0xff00;
  const blue = (rgb & 255) << 16;
  return ((255 << 24) | blue | green | red) >>> 0;
}

// Small charts of the last minutes: areas on top of each other, drawn as SVG, so that the
// style sheet says their colors.

import { el, svg } from "./dom.js";
import { duration } from "./format.js";
import { SPAN, since } from "./history.js";

const WIDE = 360;
const HIGH = 100;
const STEPS = [1, 1.5, 2, 3, 5, 7.5, 10];
const SPANS = [30, 60, 120, SPAN]; // seconds that a chart may show
const HEADROOM = 1.05; // of an axis, above what is shown

// A chart whose layers have these names, which are classes, from the bottom up. `label`
// formats the upper end of the axis.
export function chart(names, label) {
  const areas = names.map((name) => svg("path", { class: `area ${name}` }));
  const lines = names.map((name) => svg("path", { class: `line ${name}` }));
  const cross = svg("path", { class: "cross" });
  const picture = svg("svg", {
    viewBox: `0 0 ${WIDE} ${HIGH}`,
    preserveAspectRatio: "none",
    role: "img",
  });
  picture.append(
    svg("path", {
      class: "grid",
      d: `M0 0H${WIDE}M0 ${HIGH / 2}H${WIDE}M0 ${HIGH}H${WIDE}`,
    }),
    ...areas,
    ...lines.toReversed(),
    cross,
  );
  const top = el("span", { className: "top" });
  const begins = el("span");
  const ends = el("div", { className: "ends" }, begins, el("span", {}, "now"));
  const element = el("div", { className: "chart" }, top, picture, ends);

  // Draw layers of points {time, value}; `most` is where the axis ends, if it is fixed.
  function draw(layers, { now, at, most, words }) {
    const span = spanShown(now);
    const from = now - span;
    const x = (time) => ((time - from) / span) * WIDE;
    const seen = layers.map((points) => visible(points, from));
    const stacked = stack(seen);
    const highs = stacked.flatMap((points) => points.map(({ high }) => high));
    const highest = Math.max(0, ...highs);
    const end = most ?? nice(highest);
    const y = (value) => HIGH - (value / end) * HIGH;
    stacked.forEach((points, i) => {
      areas[i].setAttribute("d", area(points, x, y));
      lines[i].setAttribute("d", outline(points, x, y));
    });
    cross.setAttribute("d", at === null ? "" : `M${x(at)} 0V${HIGH}`);
    top.textContent = highest > 0 ? label(end) : ""; // nothing needs no scale
    begins.textContent = `${duration(span)} ago`;
    picture.setAttribute("aria-label", words);
  }

  return { element, picture, draw };
}

// As much as there is to show, in few steps, so that charts stay calm.
function spanShown(now) {
  return SPANS.find((span) => now - since() <= span) ?? SPAN;
}

// The points from a time on, and the one before.
function visible(points, from) {
  const first = points.findIndex(({ time }) => time >= from);
  return first < 0 ? [] : points.slice(Math.max(0, first - 1));
}

function stack(layers) {
  const base = new Map();
  return layers.map((points) =>
    points.map(({ time, value }) => {
      const low = base.get(time) ?? 0;
      base.set(time, low + value);
      return { time, low, high: low + value };
    }),
  );
}

function area(points, x, y) {
  if (!points.length) return "";
  const up = points.map(({ time, high }) => spot(x(time), y(high)));
  const down = points.map(({ time, low }) => spot(x(time), y(low))).reverse();
  return `M${[...up, ...down].join("L")}Z`;
}

function outline(points, x, y) {
  const spots = points.map(({ time, high }) => spot(x(time), y(high)));
  return spots.length ? `M${spots.join("L")}` : "";
}

function spot(x, y) {
  return `${x.toFixed(1)} ${y.toFixed(2)}`;
}

// Where an axis ends that has to show so much: at a number that is easy to read.
export function nice(value) {
  if (value <= 1) return 1;
  const size = 10 ** Math.floor(Math.log10(value * HEADROOM));
  return size * STEPS.find((step) => step * size >= value * HEADROOM);
}

// The time that a place of a chart, from 0 to 1, stands for.
export function timeAt(place, now) {
  return now - spanShown(now) * (1 - place);
}

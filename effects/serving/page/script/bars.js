// How times spread: a bar for each size, from short to long.

import { el, svg } from "./dom.js";
import { seconds, short } from "./format.js";

const FEWEST = 7; // bars, however close together all values are
const HIGH = 100;
const GAP = 0.16; // of a bar's width
const MOST_TICKS = 5; // below the bars

export function bars(name) {
  const picture = svg("svg", { preserveAspectRatio: "none", role: "img" });
  const top = el("span", { className: "top" });
  const ticks = el("div", { className: "ticks" });
  const element = el("div", { className: "chart spread" }, top, picture, ticks);

  function draw({ bounds, counts, many }, words) {
    const { from, to } = range(counts);
    const most = Math.max(1, ...counts);
    const shapes = [];
    for (let i = from; many && i <= to; i++) {
      const tall = counts[i] ? Math.max(2, (counts[i] / most) * HIGH) : 0;
      shapes.push(
        svg("rect", {
          class: `bar ${name}`,
          x: i - from + GAP / 2,
          y: HIGH - tall,
          width: 1 - GAP,
          height: tall,
        }),
      );
    }
    picture.setAttribute("viewBox", `0 0 ${to - from + 1} ${HIGH}`);
    picture.setAttribute("aria-label", words);
    picture.replaceChildren(...shapes);
    top.textContent = many ? short(most) : "";
    ticks.replaceChildren(...(many ? marks(bounds, from, to) : []));
  }

  return { element, draw };
}

// Ticks between bars, each with the time that the bars to its left are at most.
function marks(bounds, from, to) {
  const places = to - from + 1;
  const apart = Math.ceil(places / (MOST_TICKS - 1));
  const made = [];
  for (let place = 0; place <= places; place += apart) {
    const bound = from + place - 1; // the upper one of the bar to the left
    const value = bound < 0 ? "0" : bound < bounds.length ? seconds(bounds[bound]) : "∞";
    const mark = el("span", {}, value);
    mark.style.left = `${(100 * place) / places}%`;
    made.push(mark);
  }
  return made;
}

// The bars to show: those with something in them, and some to either side.
function range(counts) {
  let from = Math.max(
    0,
    counts.findIndex((one) => one > 0),
  );
  let to = Math.max(
    0,
    counts.findLastIndex((one) => one > 0),
  );
  while (to - from + 1 < Math.min(FEWEST, counts.length)) {
    if (to < counts.length - 1) to++;
    if (from > 0 && to - from + 1 < FEWEST) from--;
  }
  return { from, to };
}

// How times spread: a bar for each size, from short to long.

import { el, svg } from "./dom.js";
import { seconds } from "./format.js";

const FEWEST = 7; // bars, however close together all values are
const HIGH = 100;
const GAP = 0.16; // of a bar's width

export function bars(name) {
  const picture = svg("svg", { preserveAspectRatio: "none", role: "img" });
  const low = el("span");
  const high = el("span");
  const element = el(
    "div",
    { className: "chart spread" },
    picture,
    el("div", { className: "ends" }, low, high),
  );

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
    low.textContent = many ? seconds(bounds[from - 1] ?? 0).replace("0.0 ms", "0") : "";
    high.textContent = many
      ? to < bounds.length
        ? seconds(bounds[to])
        : `over ${seconds(bounds.at(-1))}`
      : "";
  }

  return { element, draw };
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

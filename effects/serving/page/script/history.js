// The last minutes of the engine, as one figure after the other came: rates and
// percentiles are differences between two of them.

export const SPAN = 180; // seconds that are kept
const RATE = 1; // seconds over which a rate is taken, at least
const WINDOW = 60; // seconds over which percentiles are taken, at most

let kept = [];

export function keep(figures) {
  const last = kept.at(-1);
  if (last && (figures.time < last.time || shrank(figures, last))) {
    kept = []; // another engine
  }
  kept.push(figures);
  while (kept[0].time < figures.time - SPAN - RATE) kept.shift();
}

function shrank({ counts }, before) {
  return counts.generation_tokens < before.counts.generation_tokens;
}

export function frames() {
  return kept;
}

// When it begins.
export function since() {
  return kept[0]?.time ?? 0;
}

// Points {time, value} of what each frame says.
export function values(of) {
  return kept.map((frame) => ({ time: frame.time, value: of(frame) }));
}

// How much a count grew a second.
export function rates(name) {
  const points = [];
  let from = 0;
  for (const { time, counts } of kept) {
    while (kept[from + 1]?.time <= time - RATE) from++;
    const before = kept[from];
    if (time > before.time)
      points.push({
        time,
        value: (counts[name] - before.counts[name]) / (time - before.time),
      });
  }
  return points;
}

// The distribution of values in the last `WINDOW` seconds, or since the view began to
// listen, if that is shorter; since the engine's start if none came in that time:
// {counts, bounds, many, over}, where `over` is the window's length in seconds, or null.
export function spread(name) {
  const frame = kept.at(-1);
  const { bounds, counts } = frame[name];
  const before = kept.find(({ time }) => time >= frame.time - WINDOW);
  const fresh = counts.map((all, i) => all - before[name].counts[i]);
  const recent = sum(fresh) > 0;
  const shown = recent ? fresh : counts;
  const over = recent ? frame.time - before.time : null;
  return { bounds, counts: shown, many: sum(shown), over };
}

// The value below which a share of values lies, as if they were even in each bucket; null
// if they are too few to tell it: of fewer than ten, say, none lies in the last tenth.
export function percentile({ bounds, counts, many }, share) {
  if (many < fewest(share)) return null;
  let left = share * many;
  for (let i = 0; i < counts.length; i++) {
    if (counts[i] && left <= counts[i]) {
      const low = bounds[i - 1] ?? 0;
      return low + ((bounds[i] ?? low) - low) * (left / counts[i]);
    }
    left -= counts[i];
  }
  return null;
}

// How many values it takes to speak of a share of them. The middle of one is that one.
function fewest(share) {
  return share > 0.5 ? Math.round(1 / (1 - share)) : 1;
}

function sum(numbers) {
  return numbers.reduce((all, one) => all + one, 0);
}

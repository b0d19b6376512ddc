// The last minutes of the engine, as one figure after the other came: rates and
// percentiles are differences between two of them.

export const SPAN = 180; // seconds that are kept
const RATE = 1; // seconds over which a rate is taken, at least
export const WINDOW = 60; // seconds over which percentiles are taken

let kept = [];

export function keep(figures) {
  const last = kept.at(-1);
  if (last && (figures.time < last.time || shrank(figures, last))) {
    kept = []; // another engine
  }
  kept.push(figures);
  while (kept[0].time < figures.time - SPAN - WINDOW) kept.shift();
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

// How values spread in the window that ends at a frame, or since the start if none came
// in it: {counts, bounds, many, recent}.
export function spread(name, frame) {
  const { bounds, counts } = frame[name];
  const before = kept.find(({ time }) => time >= frame.time - WINDOW) ?? frame;
  const news = counts.map((all, i) => all - before[name].counts[i]);
  const recent = sum(news) > 0;
  const shown = recent ? news : counts;
  return { bounds, counts: shown, many: sum(shown), recent };
}

// The value below which a share of values lies, as if they were even in each bucket; null
// if there are none.
export function percentile({ bounds, counts, many }, share) {
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

function sum(numbers) {
  return numbers.reduce((all, one) => all + one, 0);
}

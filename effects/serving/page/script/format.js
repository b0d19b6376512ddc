// Numbers as people read them.

const MINUTE = 60;
const HOUR = 60 * MINUTE;
const DAY = 24 * HOUR;
const THOUSAND = 1e3;
const MILLION = 1e6;

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export function count(value) {
  return whole.format(value);
}

// Three digits that count, and a unit: 12, 1,234, 56.7k, 1.23M.
export function short(value) {
  if (value < 10 * THOUSAND) return count(value);
  const [unit, size] = value < MILLION ? ["k", THOUSAND] : ["M", MILLION];
  const scaled = value / size;
  return `${scaled < 100 ? Number(scaled.toPrecision(3)) : count(scaled)}${unit}`;
}

export function rate(value) {
  return value > 0 && value < 10 ? value.toFixed(1) : short(value);
}

export function percent(part, all) {
  if (!all) return "–";
  const share = (100 * part) / all;
  return `${share > 0 && share < 10 ? share.toFixed(1) : Math.round(share)}%`;
}

// A waiting time: 0.4 ms, 12 ms, 1.3 s, 2 min 5 s.
export function seconds(value) {
  const milli = value * THOUSAND;
  if (milli < 1) return `${milli.toFixed(1)} ms`;
  if (milli < THOUSAND) return `${Math.round(milli)} ms`;
  if (value < MINUTE) return `${value < 10 ? value.toFixed(1) : Math.round(value)} s`;
  return duration(value);
}

// A time that passes: two units of it.
export function duration(value) {
  const all = Math.floor(value);
  if (all < MINUTE) return `${all} s`;
  const units = [
    ["d", DAY],
    ["h", HOUR],
    ["min", MINUTE],
    ["s", 1],
  ];
  const first = units.findIndex(([, size]) => all >= size);
  const [[big, bigger], [small, smaller]] = units.slice(first, first + 2);
  const rest = Math.floor((all % bigger) / smaller);
  return `${Math.floor(all / bigger)} ${big}${rest ? ` ${rest} ${small}` : ""}`;
}

export function tokens(value) {
  return `${count(value)} token${value === 1 ? "" : "s"}`;
}

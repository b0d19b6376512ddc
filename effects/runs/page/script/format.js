// Numbers, times and ids as a person reads them.

const MINUTE = 60;

export function clamp(low, value, high) {
  return Math.max(low, Math.min(high, value));
}

export function count(n) {
  return Math.round(n).toLocaleString("en");
}

export function many(n, one, more = `${one}s`) {
  return `${count(n)} ${n === 1 ? one : more}`;
}

// A time, or a span of it, in words.
export function clock(seconds) {
  if (seconds >= 2 * MINUTE) {
    const minutes = Math.floor(seconds / MINUTE + 1e-9);
    return `${minutes} min ${Math.floor(Math.max(0, seconds - minutes * MINUTE))} s`;
  }
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  return subsecond(seconds);
}

// A time on an axis that has a mark every `tick` seconds.
export function tickLabel(seconds, tick) {
  const digits = clamp(0, Math.ceil(-Math.log10(tick) - 1e-9), 3);
  if (tick > 10 || seconds >= MINUTE) return minutesAndSeconds(seconds, digits);
  if (tick >= 0.01 || seconds >= 1) return `${seconds ? seconds.toFixed(digits) : 0} s`;
  return subsecond(seconds);
}

function subsecond(seconds) {
  if (!seconds) return "0 s";
  if (seconds < 1e-3) return `${count(seconds * 1e6)} µs`;
  return `${(seconds * 1e3).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
}

function minutesAndSeconds(seconds, digits) {
  const rounded = Number(seconds.toFixed(digits));
  const minutes = Math.floor(rounded / MINUTE);
  const rest = (rounded - minutes * MINUTE).toFixed(digits);
  const width = digits ? digits + 3 : 2;
  const hours = Math.floor(minutes / 60);
  const whole = hours ? `${hours}:${String(minutes % 60).padStart(2, "0")}` : minutes;
  return `${whole}:${rest.padStart(width, "0")}`;
}

// A text in two parts and the middle between them, which is left out where there is no
// room. Ids of one server begin alike (`chatcmpl-...`), so the end is kept too. Cut
// between characters, not within one that takes two units.
export function folded(text, most) {
  const letters = text.length > most ? [...text] : [];
  if (letters.length <= most) return { head: text, middle: "", tail: "" };
  const tail = Math.floor((most - 1) / 2);
  const head = most - 1 - tail;
  return {
    head: letters.slice(0, head).join(""),
    middle: letters.slice(head, letters.length - tail).join(""),
    tail: letters.slice(letters.length - tail).join(""),
  };
}

// Control characters, and those that turn the direction of what stands beside them.
const UNSEEN = /[\p{Cc}\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/gu;

// The same as one text, for places that hold no markup: labels, tips, links.
export function shortened(text, most) {
  const { head, middle, tail } = folded(text, most);
  return `${head}${middle && "…"}${tail}`.replace(UNSEEN, "\ufffd");
}

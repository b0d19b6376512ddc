// The side panel's upper half: the story of the sequence that is chosen.

import { $, bar, el, item, list } from "./dom.js";
import { clock, count, folded, many } from "./format.js";
import { PALETTE, came, draftsIn, front, held, lives, segments, waits } from "./lives.js";
import { seconds } from "./pauses.js";
import { kind, log, sample, text, turns } from "./run.js";
import { chosen } from "./selection.js";
import { entry, passed, draftsInWords } from "./sentences.js";

const ENTRIES = 200; // of a story that are shown
const ID = 40; // letters of an id; more are folded away in its middle
const SPENT = {
  waiting: "waiting",
  fill: "in prefill",
  decode: "writing",
  again: "waiting again",
};

export function showStory() {
  if (chosen < 0) {
    $("story").replaceChildren();
    return;
  }
  const spent = timeSpent(lives[chosen]);
  const close = el("button", {}, "Close");
  close.dataset.sample = -1;
  $("story").replaceChildren(
    el("div", { className: "title" }, el("h2", {}, "Request ", wholeId(chosen)), close),
    el("p", {}, inShort(chosen, spent)),
    bar(spent),
    list("Its story", story(chosen), ENTRIES),
  );
}

// An id of which all is there, to be copied and searched for, and on hover; of a long one
// the middle takes no room.
function wholeId(s) {
  const id = text(sample.id[s]);
  const { head, middle, tail } = folded(id, ID);
  const made = el("bdi", { className: "id", title: id }, el("span", {}, head));
  if (middle) {
    made.append(el("span", { className: "folded" }, middle), el("span", {}, tail));
  }
  return made;
}

// Seconds in each state, by the name of its color.
function timeSpent(life) {
  const spent = { waiting: 0, fill: 0, decode: 0, again: 0 };
  for (const { from, until, state } of segments(life)) {
    if (until > from) spent[PALETTE[state]] += seconds[until] - seconds[from];
  }
  return spent;
}

function inShort(s, spent) {
  const { born, died, first, end } = lives[s];
  const about = text(sample.about[s]);
  const prompt = many(sample.prompt[s], "prompt token");
  const parts = [];
  if (sample.n[s] > 1) parts.push(`Sample ${sample.sample[s] + 1} of ${sample.n[s]}.`);
  parts.push(
    `${prompt}, at most ${count(sample.most[s])} to write${about && `; ${about}`}.`,
  );
  if (!came(s)) parts.push("It was there as this recording begins.");
  else if (first >= 0) parts.push(`First token after ${passed(born, first)}.`);
  const times = Object.entries(spent)
    .filter(([, time]) => time > 0)
    .map(([name, time]) => `${clock(time)} ${SPENT[name]}`);
  const how = `${end >= 0 ? "Ended" : "Not ended"} after`;
  const whole = passed(born, Math.min(died, turns - 1));
  parts.push(`${how} ${whole}${times.length ? `: ${times.join(", ")}` : ""}.`);
  const drafts = draftsIn(lives[s].drafts.values());
  if (drafts) {
    const length = (1 + drafts.accepted / drafts.steps).toFixed(2);
    const steps = many(drafts.steps, "step");
    const brought = `${steps} that brought ${length} tokens each`;
    parts.push(`${draftsInWords(drafts)}, in ${brought}.`);
  }
  return parts.join(" ");
}

// Its own entries, and why those ahead of it in the waiting queue waited while it did;
// several of one sort in a row are shown as one.
function story(s) {
  const { born, notes } = lives[s];
  const ahead = held.filter((i) => log.sample[i] !== s && waits(s, log.turn[i]));
  const inOrder = [...notes, ...ahead].sort((one, other) => one - other);
  const entries = [...new Set([notes[0], ...(came(s) ? front(born) : []), ...inOrder])];
  const items = [];
  for (let n = 0, next; n < entries.length; n = next) {
    next = n + 1;
    while (next < entries.length && alike(s, entries[n], entries[next])) next++;
    const t = Math.max(born, log.turn[entries[n]]);
    items.push(passage(s, entries.slice(n, next)));
    const when = el("button", { className: "link" }, `+${passed(born, t)}`);
    when.dataset.turn = t;
    items.at(-1).prepend(when, " ");
  }
  return items;
}

function isAhead(s, i) {
  return log.sample[i] !== s;
}

function isChunk(s, i) {
  return !isAhead(s, i) && log.kind[i] === kind.Chunk;
}

function alike(s, one, other) {
  if (isAhead(s, one)) return isAhead(s, other);
  return isChunk(s, one) && isChunk(s, other);
}

// Entries of one sort as a sentence.
function passage(s, entries) {
  const [i] = entries;
  if (isChunk(s, i)) {
    const tokens = entries.reduce((sum, one) => sum + log.b[one], 0);
    const steps = many(entries.length, "step");
    return item([`${many(tokens, "token")} of it read, in ${steps}`], "fill");
  }
  if (!isAhead(s, i)) return entry(i, "it");
  const more = entries.length - 1;
  const others = more ? `; ${many(more, "more wait")} ahead of it` : "";
  return item(["head of the queue: ", ...entry(i).childNodes, others], "held");
}

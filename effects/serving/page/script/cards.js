// The cards of the live view: each shows figures of a frame and of earlier frames.

import { bars } from "./bars.js";
import { chart, timeAt } from "./chart.js";
import { $, el } from "./dom.js";
import { count, duration, percent, rate, seconds, short } from "./format.js";
import { frames, percentile, rates, spread, values } from "./history.js";

// What waiting sequences wait for, in words.
const WAITS = {
  turn: "behind the head of the queue",
  blocks: "for KV blocks: the cache is full",
  rows: "for a batch row: the batch is full",
  budget: "for token budget: the step is full",
  sibling: "for a sample that computes the same prompt",
  policy: "deferred by the scheduling policy",
  loading: "for cached blocks that are on their way",
  replica: "for a replica that takes requests",
  share: "while their clients use their share of rows",
  step: "for the next step",
  fault: "while a suspect of a failed step runs without others",
};

const TOO_FEW = "–"; // in place of a percentile of too few values

// Where a pointer looks: a place in a chart, from 0 to 1, which stays below the pointer
// while time goes by; null: at the end, now.
let pointed = null;
const updates = []; // of the cards, each a function that draws one

export function makeCards() {
  $("cards").replaceChildren(
    rateCard("Generated tokens", "generation_tokens", "decode", "tokens/s"),
    rateCard("Prompt tokens", "prompt_tokens", "fill", "tokens/s"),
    batchCard(),
    cacheCard(),
    timeCard("Time to first token", "ttft", "fill", "No answer has begun yet."),
    timeCard("Time between tokens", "itl", "decode", "No answer has two tokens yet."),
    waitCard(),
    totalCard(),
    replicaCard(),
  );
}

// Draw all cards, for now or for the time at the pointer.
export function drawCards() {
  const all = frames();
  if (!all.length) return;
  const now = all.at(-1).time;
  const at = pointed === null ? now : timeAt(pointed, now);
  const frame = all.findLast(({ time }) => time <= at) ?? all[0];
  $("moment").textContent =
    pointed === null ? "" : `as it was ${duration(Math.max(0, now - frame.time))} ago`;
  const when = { now, at: pointed === null ? null : frame.time };
  for (const update of updates) update(frame, when);
}

// A card has a title, one large figure with its unit, a note, and what is drawn below.
function card(title, ...inside) {
  const number = el("strong");
  const unit = el("span", { className: "unit" });
  const note = el("span", { className: "note" });
  const head = el("div", { className: "figure" }, number, unit, note);
  const element = el(
    "section",
    { className: "card" },
    el("h2", {}, title),
    head,
    ...inside,
  );
  const setFigure = (value, of, beside = "") => {
    number.textContent = value;
    unit.textContent = of;
    note.textContent = beside;
  };
  return { element, setFigure };
}

function listen(made) {
  made.picture.onpointermove = ({ clientX }) => {
    const { left, width } = made.picture.getBoundingClientRect();
    pointed = (clientX - left) / width;
    drawCards();
  };
  made.picture.onpointerleave = () => {
    pointed = null;
    drawCards();
  };
  return made;
}

function rateCard(title, name, look, unit) {
  const made = listen(chart([look], rate));
  const { element, setFigure } = card(title, made.element);
  updates.push((frame, when) => {
    const points = rates(name);
    const value = (points.findLast(({ time }) => time <= frame.time) ?? { value: 0 })
      .value;
    const idle = !frame.running && !frame.waiting;
    setFigure(rate(value), unit, idle ? "idle" : "");
    const most = Math.max(0, ...points.map((point) => point.value));
    made.draw([points], {
      ...when,
      words: `${title}: ${rate(value)} ${unit} now, at most ${rate(most)}`,
    });
  });
  return element;
}

function batchCard() {
  const made = listen(chart(["decode", "waiting"], count));
  const waiting = el("b");
  const legend = [
    el("span", {}, el("i", { className: "decode" }), "running"),
    el("span", {}, el("i", { className: "waiting" }), waiting, " waiting"),
  ];
  const { element, setFigure } = card(
    "Sequences",
    el("div", { className: "legend" }, ...legend),
    made.element,
  );
  updates.push((frame, when) => {
    setFigure(count(frame.running), "running", `of at most ${count(frame.rows)}`);
    waiting.textContent = count(frame.waiting);
    const layers = [values(({ running }) => running), values(({ waiting }) => waiting)];
    made.draw(layers, {
      ...when,
      words: `${frame.running} sequences run, ${frame.waiting} wait`,
    });
  });
  return element;
}

const POOL = ["used", "cached", "free"];

function cacheCard() {
  const made = listen(chart(["used", "cached"], (end) => short(end)));
  const parts = POOL.map((name) => el("i", { className: name }));
  const counts = POOL.map(() => el("b"));
  const legend = POOL.map((name, i) =>
    el("span", {}, el("i", { className: name }), counts[i], ` ${name}`),
  );
  const bar = el("div", { className: "bar" }, ...parts);
  const { element, setFigure } = card(
    "KV cache",
    bar,
    el("div", { className: "legend" }, ...legend),
    made.element,
  );
  updates.push((frame, when) => {
    setFigure(
      percent(frame.blocks_used, frame.blocks),
      "used",
      `of ${short(frame.blocks)} blocks`,
    );
    POOL.forEach((name, i) => {
      parts[i].style.flexGrow = frame[`blocks_${name}`];
      counts[i].textContent = short(frame[`blocks_${name}`]);
    });
    const most = Math.max(
      ...values((one) => one.blocks_used + one.blocks_cached).map(({ value }) => value),
    );
    const layers = [values((one) => one.blocks_used), values((one) => one.blocks_cached)];
    const { blocks, blocks_used: used, blocks_cached: cached } = frame;
    const words = `Of ${blocks} KV blocks ${used} are used and ${cached} cached`;
    made.draw(layers, {
      ...when,
      words,
      ...(most > frame.blocks / 2 ? { most: frame.blocks } : {}),
    });
  });
  return element;
}

// The distribution of times in a window that ends now, wherever the pointer is.
function timeCard(title, name, look, nothing) {
  const drawn = bars(look);
  const shares = [0.9, 0.99].map((share) => ({ share, value: el("b") }));
  const more = shares.map(({ share, value }) =>
    el("span", {}, `${share * 100}% within `, value),
  );
  const legend = el("div", { className: "legend" }, ...more);
  const empty = el("p", { className: "soft" }, nothing);
  const { element, setFigure } = card(title, legend, empty, drawn.element);
  updates.push(() => {
    const found = spread(name);
    const label = (share) => {
      const value = percentile(found, share);
      return value === null ? TOO_FEW : seconds(value);
    };
    legend.hidden = !found.many;
    empty.hidden = Boolean(found.many);
    if (found.many) setFigure(label(0.5), "median", within(found));
    else setFigure(TOO_FEW, "");
    for (const { share, value } of shares) {
      value.textContent = label(share);
      const few = label(share) === TOO_FEW;
      value.title = few ? `${count(found.many)} values are too few` : "";
    }
    const shown = `half within ${label(0.5)}, 99 percent within ${label(0.99)}`;
    drawn.draw(found, `${title}, ${within(found)}: ${shown}`);
  });
  return element;
}

// How many values there are, and of what time.
function within({ many, over }) {
  if (!many) return "none yet";
  const time = over === null ? "since the start" : `in the last ${Math.round(over)} s`;
  return `${short(many)} ${time}`;
}

function waitCard() {
  const list = el("ul", { className: "waits" });
  const { element, setFigure } = card("Waiting queue", list);
  updates.push((frame) => {
    setFigure(count(frame.waiting), frame.waiting === 1 ? "sequence" : "sequences");
    const causes = Object.entries(frame.waiting_for).filter(([, many]) => many);
    const lines = causes.map(([cause, many]) =>
      el("li", {}, el("b", {}, count(many)), WAITS[cause] ?? cause),
    );
    list.replaceChildren(
      ...(lines.length ? lines : [el("li", { className: "soft" }, "No sequence waits.")]),
    );
  });
  return element;
}

const TOTALS = {
  "prompt tokens": ({ counts }) => count(counts.prompt_tokens),
  "generated tokens": ({ counts }) => count(counts.generation_tokens),
  preemptions: ({ counts }) => count(counts.num_preemptions),
  "failed steps": ({ counts }) => count(counts.failed_steps),
};

// Of speculative decoding: shown once drafts were verified.
const DRAFTS = {
  "accepted drafts": (counts) =>
    percent(counts.spec_decode_num_accepted_tokens, counts.spec_decode_num_draft_tokens),
  "tokens a step with drafts": (counts) => {
    const length =
      counts.spec_decode_num_accepted_tokens / counts.spec_decode_num_drafts || 0;
    return (1 + length).toFixed(2);
  },
};

function totalCard() {
  const totals = Object.entries(TOTALS).map(([name, of]) => ({
    name,
    of,
    value: el("dd"),
  }));
  const drafts = Object.entries(DRAFTS).map(([name, of]) => {
    const value = el("dd");
    return { of, value, row: el("div", { hidden: true }, el("dt", {}, name), value) };
  });
  const list = el(
    "dl",
    {},
    ...totals.map(({ name, value }) => el("div", {}, el("dt", {}, name), value)),
  );
  const { element, setFigure } = card("Since the start", list);
  list.append(...drafts.map(({ row }) => row));
  updates.push((frame) => {
    const { prefix_cache_hits: hits, prefix_cache_queries: queries } = frame.counts;
    setFigure(percent(hits, queries), "prefix hit rate");
    for (const { of, value } of totals) value.textContent = of(frame);
    for (const { row, of, value } of drafts) {
      row.hidden = !frame.counts.spec_decode_num_drafts;
      value.textContent = of(frame.counts);
    }
  });
  return element;
}

// Each of several engines: where it is, and what it does. Not shown of one alone.
function replicaCard() {
  const list = el("ul", { className: "waits" });
  const { element, setFigure } = card("Replicas", list);
  updates.push((frame) => {
    const each = frame.replicas;
    element.hidden = !each.length;
    const ready = each.filter(({ unready }) => !unready).length;
    setFigure(count(ready), "ready", `of ${count(each.length)}`);
    list.replaceChildren(...each.map(replicaLine));
  });
  return element;
}

function replicaLine({ name, machine, role, unready, ...replica }) {
  const { running, waiting, blocks, blocks_free: free } = replica;
  const what = role === "both" ? "" : `, ${role}`;
  const where = machine ? ` on ${machine}` : "";
  const used = percent(blocks - free, blocks);
  const does = unready || `${running} running, ${waiting} waiting, KV ${used}`;
  return el("li", {}, el("b", {}, name), `${where}${what}: ${does}`);
}

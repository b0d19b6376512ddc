// The side panel's lower half: what happened in a turn.

import { $, bar, el, item, list } from "./dom.js";
import { clock, count, many } from "./format.js";
import { POOL } from "./canvas.js";
import { draftsOf, front, logAt, stepAt } from "./lives.js";
import { seconds } from "./pauses.js";
import { kindOf, log, run, step, turn } from "./run.js";
import { cursor } from "./selection.js";
import { entry, link, draftsInWords } from "./sentences.js";

const NAMES = 20; // of those whose prompt a step reads

const EVENTS = ["Submit", "Cancel", "Finish", "Pause", "Failed", "Present"];

export function showTurn() {
  const t = cursor;
  const events = turn.done[t] < 0 ? [] : [resultsOf(t)];
  const decided = [];
  const read = [];
  for (let i = logAt[t]; i < logAt[t + 1]; i++) {
    if (kindOf(i) === "Chunk") read.push(i);
    else (EVENTS.includes(kindOf(i)) ? events : decided).push(entry(i));
  }
  if (!decided.length) decided.push(item(["nothing out of the ordinary: all go on"]));
  $("turn").replaceChildren(
    el(
      "h2",
      {},
      `Turn ${count(t + run.first)} `,
      el("span", { className: "soft" }, `at ${clock(seconds[t])}`),
    ),
    el(
      "p",
      { className: "soft" },
      "In a turn the engine folds events, schedules, and launches the next step.",
    ),
    list("Events", events),
    list("Decisions, and why", decided),
    list("What runs next", stepsOf(t, read)),
    list("Where that leaves it", stateOf(t)),
  );
  showNow(t);
}

function showNow(t) {
  $("now").textContent = `Turn ${count(t + run.first)} · ${clock(seconds[t])}`;
  $("ruler").setAttribute("aria-valuenow", t + run.first);
  $("ruler").setAttribute("aria-valuetext", $("now").textContent);
}

function resultsOf(t) {
  const tokens = many(turn.tokens[t], "new token");
  const drafts = draftsOf(t);
  const also = drafts ? `, ${draftsInWords(drafts)}` : "";
  return item([`step ${count(turn.done[t])} is done: ${tokens}${also}`]);
}

function stepsOf(t, read) {
  const steps = [];
  for (let k = stepAt[t]; k < stepAt[t + 1]; k++) {
    steps.push(
      planned(
        k,
        read.filter((i) => log.a[i] === step.number[k]),
      ),
    );
  }
  return steps.length ? steps : [item(["no new step"])];
}

// A step as a sentence; `chunks` are the entries of those whose prompt it reads.
function planned(k, chunks) {
  const decode = step.decode[k];
  const prefill = step.prefill[k];
  const parts = [];
  if (decode) {
    parts.push(`${many(decode, "sequence writes", "sequences write")} a token`);
  }
  const drafts = step.drafts[k];
  if (drafts) {
    parts.push(`${many(drafts, "draft")} ${drafts === 1 ? "is" : "are"} verified`);
  }
  if (step.chunks[k]) {
    const tokens = `${many(prefill, "token")} of ${many(step.chunks[k], "sequence")}`;
    parts.push(`${tokens} ${prefill === 1 ? "is" : "are"} read`);
  }
  const shown = chunks.slice(0, NAMES);
  const names = shown.flatMap((i, n) => [
    n ? ", " : ": ",
    link(log.sample[i]),
    ` (${count(log.b[i])})`,
  ]);
  const most = count(run.max_num_batched_tokens);
  const budget = `${count(decode + drafts + prefill)} of at most ${most}`;
  return item([
    `step ${count(step.number[k])}, ${budget} tokens: ${parts.join(", ")}`,
    ...names,
    step.chunks[k] > shown.length ? " and others" : "",
  ]);
}

function stateOf(t) {
  const running = `${count(turn.running[t])} of at most ${count(run.max_num_seqs)}`;
  const state = [item([`${running} sequences run, ${count(turn.waiting[t])} wait`])];
  for (const i of front(t)) {
    const when = ` (logged in turn ${count(log.turn[i] + run.first)})`;
    state.push(item(["head of the queue: ", ...entry(i).childNodes, when], "held"));
  }
  const pool = Object.fromEntries(POOL.map((name) => [name, turn[name][t]]));
  const words = POOL.map((name) => `${count(pool[name])} ${name}`).join(", ");
  state.push(item([`${words} blocks`, bar(pool)]));
  return state;
}

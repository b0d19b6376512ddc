// The words around the panels: what run this is, and what its axes stand for.

import { $, el } from "./dom.js";
import { clock, count, many } from "./format.js";
import { sharesRows } from "./lanes.js";
import { allDrafts, marks } from "./lives.js";
import { used } from "./panels.js";
import { pauses, seconds } from "./pauses.js";
import { kind, log, run, samples, text, turn, turns } from "./run.js";

export function showHeadline() {
  $("name").textContent = run.name;
  document.title = `${run.name} - minfer view`;
  $("facts").replaceChildren(
    ...facts().map(([value, name]) =>
      el("div", {}, el("dd", {}, value), el("dt", {}, name)),
    ),
  );
  $("rows").textContent = sharesRows()
    ? "later ones use rows again"
    : "first come, first row";
  $("most-rows").textContent = `at most ${count(run.max_num_seqs)} at once`;
  $("blocks").textContent = blocksInWords();
  $("budget").textContent = budgetInWords();
  const some = Boolean(allDrafts());
  for (const key of document.querySelectorAll(".of-drafts")) key.hidden = !some;
  $("cut-pauses").title = pausesInWords();
  $("ruler").setAttribute("aria-valuemax", turns - 1 + run.first);
}

function facts() {
  const ends = endings();
  const tokens = turn.tokens.reduce((sum, some) => sum + some, 0);
  const share = (100 * run.cached) / (run.prompt || 1);
  const preempted = marks.filter((i) => log.kind[i] === kind.Preempted).length;
  const overrides = log.kind.filter((what) => what === kind.PolicyOverride).length;
  const bad = ["cancelled", "error", "rejected"].filter((why) => ends[why]);
  const found = [
    [count(samples), samples === 1 ? "sequence" : "sequences"],
    [clock(seconds[turns - 1]), "long"],
    [count(turns), "turns"],
    [count(tokens), "tokens written"],
    [`${share.toFixed(0)}%`, "of prompts cached"],
    [count(preempted), "preempted"],
    ...bad.map((why) => [count(ends[why]), why]),
    [run.policy, "policy"],
  ];
  if (overrides) found.push([count(overrides), "answers of it not used"]);
  const drafts = allDrafts();
  if (drafts) {
    const right = (100 * drafts.accepted) / drafts.proposed;
    found.splice(overrides ? -2 : -1, 0, [`${right.toFixed(0)}%`, "of drafts accepted"]);
  }
  if (pauses.length) found.splice(2, 0, [clock(paused()), "of it idle"]);
  return found;
}

// The number of ends by reason.
function endings() {
  const ends = { __proto__: null };
  log.kind.forEach((what, i) => {
    if (what !== kind.Finished) return;
    const why = text(log.a[i]);
    ends[why] = (ends[why] ?? 0) + 1;
  });
  return ends;
}

function paused() {
  return pauses.reduce((sum, { length }) => sum + length, 0);
}

function pausesInWords() {
  const all = `${many(pauses.length, "pause")}, ${clock(paused())} in all`;
  return `${all}, in which no request ran or waited: hatched, and not drawn to scale`;
}

function blocksInWords() {
  const all = many(run.num_blocks, "KV block");
  const size = many(run.block_size, "token");
  if (used.blocksEnd >= run.num_blocks) return `Where the ${all} of ${size} are.`;
  return `At most ${count(used.blocks)} of ${all} (${size} each) were not free.`;
}

function budgetInWords() {
  const most = count(run.max_num_batched_tokens);
  if (used.tokensEnd >= run.max_num_batched_tokens) return `at most ${most} (dashed)`;
  return `at most ${count(used.tokens)}; ${most} are allowed`;
}

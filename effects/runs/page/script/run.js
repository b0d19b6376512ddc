// The run, in the columns of effects/runs/page/columns.py.
// Everywhere `t` is a turn, `s` a sample, `k` a step, and `i` an entry of the log.

import { $ } from "./dom.js";
import { shortened } from "./format.js";

export let run; // the header: name, sizes, texts
export let turn; // a table of columns each
export let step;
export let sample;
export let log;
export let draft;
export let turns; // how many
export let samples;
export let kind; // name of what the log says -> its number

const WORD = 8; // bytes

export async function unpack() {
  const buffer = await inflated($("data").textContent);
  const size = Number(new DataView(buffer).getBigUint64(0, true));
  run = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, WORD, size)));
  readColumns(buffer, WORD + size);
  ({ turn, step, sample, log, draft } = run);
  turns = turn.free.length;
  samples = sample.id.length;
  kind = Object.fromEntries(Object.keys(run.kinds).map((name, number) => [name, number]));
  turn.private = turn.free.map(
    (free, t) => run.num_blocks - free - turn.cached[t] - turn.shareable[t],
  );
}

function inflated(base64) {
  const packed = atob(base64);
  const bytes = new Uint8Array(packed.length);
  for (let at = 0; at < packed.length; at++) bytes[at] = packed.charCodeAt(at);
  const stream = new Blob([bytes])
    .stream()
    .pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

// A column is its first cell, and then differences.
function readColumns(buffer, begin) {
  let place = begin;
  for (const [name, type, length] of run.columns) {
    const column = new (type === "d" ? Float64Array : Int32Array)(buffer, place, length);
    const [table, own] = name.split(".");
    for (let at = 1; at < length; at++) column[at] += column[at - 1];
    place += column.byteLength;
    (run[table] ??= {})[own] = column;
  }
}

export function text(place) {
  return run.texts[place] ?? "";
}

// The name of an entry's kind.
export function kindOf(i) {
  return Object.keys(kind)[log.kind[i]];
}

// A sample's id, short enough for where it stands.
export function brief(s, most = 40) {
  const part = sample.n[s] > 1 ? ` #${sample.sample[s] + 1}` : "";
  return shortened(text(sample.id[s]), most) + part;
}

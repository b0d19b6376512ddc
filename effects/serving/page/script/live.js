// The live view listens to the engine only while it is visible.

import { request, events } from "./api.js";
import { drawCards } from "./cards.js";
import { $ } from "./dom.js";
import { count, duration } from "./format.js";
import { keep } from "./history.js";

const AGAIN = 2000; // milliseconds after which a lost view is asked for again
let listening = null; // what ends it

export function setListening(on) {
  if (on && !listening) listen((listening = new AbortController()));
  if (!on && listening) {
    listening.abort();
    listening = null;
  }
}

async function listen({ signal }) {
  while (!signal.aborted) {
    try {
      for await (const data of events(await request("live", { signal })))
        show(JSON.parse(data));
      lost("The server has stopped.");
    } catch (error) {
      if (signal.aborted) return;
      lost(error.message);
      if (error.status === 401) return; // no key was given: do not ask again
    }
    await new Promise((resolve) => setTimeout(resolve, AGAIN));
  }
}

function show(figures) {
  keep(figures);
  const well = figures.health === "ok";
  health(well ? "well" : "ill", well ? "Healthy" : figures.health);
  $("facts").textContent = facts(figures);
  drawCards();
}

function facts({ uptime, version, blocks, block_size: size }) {
  const cache = `${count(blocks)} KV blocks of ${size} tokens`;
  return `up ${duration(uptime)} · minfer ${version} · ${cache}`;
}

function lost(words) {
  health("lost", words);
}

function health(state, words) {
  $("health").dataset.state = state;
  const label = $("health").querySelector("span");
  // Screen readers read each change.
  if (label.textContent !== words) label.textContent = words;
}

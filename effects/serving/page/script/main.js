// The page begins here: meet the server, wait for a prompt, listen to the engine.

import { makeCards } from "./cards.js";
import { $ } from "./dom.js";
import { count } from "./format.js";
import { listenToPrompt } from "./prompt.js";
import { meet, model } from "./server.js";
import { listenToViews } from "./views.js";

async function main() {
  makeCards();
  await meet();
  $("model").textContent = model.id;
  $("model").title = `${model.id}: ${count(model.max_model_len)} tokens of context`;
  document.title = `${model.id} · minfer`;
  $("bundled").hidden = !model.bundled;
  listenToPrompt();
  if (!matchMedia("(hover: none)").matches) $("input").focus(); // else a keyboard opens
  listenToViews();
  document.documentElement.dataset.drawn = "";
}

main().catch((error) => {
  $("error").textContent = `Not connected. ${error.message}`;
  document.documentElement.dataset.failed = String(error);
});

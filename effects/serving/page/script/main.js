// The entry point: loads the model's name, then serves the prompt box and the live view.

import { makeCards } from "./cards.js";
import { $ } from "./dom.js";
import { count } from "./format.js";
import { listenToPrompt } from "./prompt.js";
import { loadModel, model } from "./server.js";
import { listenToViews } from "./views.js";

async function main() {
  makeCards();
  await loadModel();
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

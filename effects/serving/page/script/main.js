// The page begins here: meet the server, open the last conversation, listen.

import { makeCards } from "./cards.js";
import { begin, current, open, openLast } from "./chat.js";
import { listenToComposer } from "./composer.js";
import { listenToSide, showList } from "./conversations.js";
import { $, el } from "./dom.js";
import { count } from "./format.js";
import { listenToScrolling } from "./scroll.js";
import { meet, model } from "./server.js";
import { listenToSettings } from "./settings.js";
import { changedElsewhere } from "./store.js";
import { listenToViews } from "./views.js";

async function main() {
  makeCards();
  listenToScrolling();
  listenToSide(begin);
  listenToSettings();
  await meet();
  $("model").textContent = model.id;
  $("model").title = `${model.id}: ${count(model.max_model_len)} tokens of context`;
  document.title = `${model.id} · minfer`;
  openLast();
  listenToComposer();
  if (!matchMedia("(hover: none)").matches) $("input").focus(); // else a keyboard opens
  listenToViews();
  window.addEventListener("storage", ({ key }) => {
    changedElsewhere(key);
    showList(current(), { open, begin });
  });
  document.documentElement.dataset.drawn = "";
}

main().catch((error) => {
  const again = el(
    "button",
    { className: "main", onclick: () => location.reload() },
    "Try again",
  );
  $("talk").replaceChildren(
    el(
      "section",
      { className: "welcome" },
      el("h2", {}, "Not connected"),
      el("p", {}, error.message),
      again,
    ),
  );
  document.documentElement.dataset.failed = String(error);
});

// The dialog of settings; each counts as soon as it is changed.

import { refresh } from "./chat.js";
import { $ } from "./dom.js";
import { forgetKey, key } from "./key.js";
import { model } from "./server.js";
import { DEFAULTS, keepSettings, settings } from "./store.js";

export function listenToSettings() {
  for (const name of Object.keys(DEFAULTS)) $(`set-${name}`).oninput = keep;
  $("open-settings").onclick = () => {
    show();
    $("settings").showModal();
  };
  $("close-settings").onclick = () => $("settings").close();
  $("settings").onclick = ({ target }) => {
    if (target === $("settings")) $("settings").close(); // beside it
  };
  $("reset-settings").onclick = () => {
    keepSettings(DEFAULTS);
    show();
    refresh();
  };
  $("forget-key").onclick = () => {
    forgetKey();
    $("forget-key").hidden = true;
  };
}

function show() {
  for (const [name, value] of Object.entries(settings())) {
    const field = $(`set-${name}`);
    if (!field) continue;
    if (field.type === "checkbox") field.checked = value;
    else field.value = value;
  }
  $("set-max_tokens").placeholder = model.chat ? "as many as fit" : "256";
  $("set-system").disabled = !model.chat;
  $("no-system").hidden = model.chat;
  $("forget-key").hidden = !key();
}

// What a field cannot take is not kept, and the field says so.
function keep() {
  const values = settings();
  for (const name of Object.keys(DEFAULTS)) {
    const field = $(`set-${name}`);
    if (field.type === "checkbox") values[name] = field.checked;
    else if (field.checkValidity()) values[name] = field.value;
  }
  keepSettings(values);
  refresh();
}

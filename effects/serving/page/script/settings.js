// The dialog of settings; each counts as soon as it is changed.
//
// What a field cannot take is not kept: below the field stands why, and the dialog stays
// open until it is mended. Until then the setting is what it was when the dialog opened,
// and not what half of a number may have meant.

import { refresh } from "./chat.js";
import { $, el } from "./dom.js";
import { count } from "./format.js";
import { forgetKey, key } from "./key.js";
import { model } from "./server.js";
import { DEFAULTS, keepSettings, settings } from "./store.js";

const NAMES = Object.keys(DEFAULTS);
let before = DEFAULTS; // what was set when the dialog opened

export function listenToSettings() {
  for (const name of NAMES) $(`set-${name}`).oninput = keep;
  $("open-settings").onclick = () => {
    show();
    $("settings").showModal();
  };
  $("close-settings").onclick = close;
  $("settings").onclick = ({ target }) => {
    if (target === $("settings")) close(); // beside it
  };
  $("settings").oncancel = (event) => {
    event.preventDefault(); // Escape is no way around what is wrong
    close();
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
  before = settings();
  for (const name of NAMES) {
    const field = $(`set-${name}`);
    if (field.type === "checkbox") field.checked = before[name];
    else field.value = before[name];
  }
  $("set-max_tokens").max = model.max_model_len - 1; // one is the prompt's
  $("set-max_tokens").placeholder = model.chat ? "as many as fit" : "256";
  $("set-system").disabled = !model.chat;
  $("no-system").hidden = model.chat;
  $("forget-key").hidden = !key();
  for (const name of NAMES) tell($(`set-${name}`));
}

function keep() {
  const values = settings();
  for (const name of NAMES) {
    const field = $(`set-${name}`);
    if (field.type === "checkbox") values[name] = field.checked;
    else values[name] = wrong(field) ? before[name] : field.value;
    tell(field);
  }
  keepSettings(values);
  refresh();
}

// Close, unless something is wrong: then that is where to go on.
function close() {
  const bad = NAMES.map((name) => $(`set-${name}`)).find(wrong);
  if (bad) bad.focus();
  else $("settings").close();
}

// What is wrong with what stands in a field, or nothing.
function wrong(field) {
  const { validity, value, min, max, step } = field;
  if (validity.badInput) return "This is no number.";
  if (validity.rangeUnderflow) return `Must be at least ${count(min)}.`;
  if (validity.rangeOverflow) return `Must be at most ${count(max)}.`;
  if (step === "1" && !Number.isInteger(Number(value))) return "Must be a whole number.";
  if (field.dataset.above && value && Number(value) <= Number(field.dataset.above))
    return `Must be above ${field.dataset.above}.`;
  return "";
}

function tell(field) {
  const why = wrong(field);
  const id = `${field.id}-wrong`;
  const place = $(id) ?? el("small", { id, className: "wrong", role: "alert" });
  if (!place.isConnected) field.after(place);
  if (place.textContent !== why) place.textContent = why; // said once
  field.ariaInvalid = String(Boolean(why));
  field.setAttribute("aria-describedby", id);
}

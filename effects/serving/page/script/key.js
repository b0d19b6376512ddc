// The server's key, if it wants one. It is asked for once, whoever needs it.

import { $ } from "./dom.js";

const NAME = "minfer.key";
let asking = null;

export function key() {
  return sessionStorage.getItem(NAME) ?? "";
}

// Resolves to whether a key was given.
export function askForKey(wrong) {
  asking ??= dialog(wrong).finally(() => (asking = null));
  return asking;
}

function dialog(wrong) {
  const box = $("key");
  $("key-title").textContent = wrong
    ? "That key is not right"
    : "This server asks for a key";
  $("key-input").value = "";
  box.showModal();
  return new Promise((resolve) => {
    let given = false;
    $("key-form").onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem(NAME, $("key-input").value.trim());
      given = true;
      box.close();
    };
    $("key-cancel").onclick = () => box.close();
    box.onclose = () => resolve(given);
  });
}

// The server's API key, if it needs one. One dialog asks for it, for all requests.

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
    ? "This API key is wrong"
    : "This server needs an API key";
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

// The list of conversations at the side.

import { isRunning } from "./answer.js";
import { $, el, icon } from "./dom.js";
import { forget, talks, title } from "./store.js";

const SURE = 3000; // milliseconds in which a second press means it

export function showList(shown, acts) {
  $("conversations").replaceChildren(...talks().map((talk) => entry(talk, shown, acts)));
}

function entry(talk, shown, acts) {
  const name = el("button", { className: "name", title: title(talk) }, title(talk));
  const own = talk.id === shown.id;
  if (own) name.setAttribute("aria-current", "true");
  name.onclick = () => {
    if (!own) acts.open(talk);
    closeSide();
  };
  const busy = isRunning(talk)
    ? [el("i", { className: "busy", title: "An answer is being written" })]
    : [];
  return el("li", {}, name, ...busy, bin(talk, own, shown, acts));
}

function bin(talk, own, shown, acts) {
  const button = el(
    "button",
    { className: "quiet tool bin", title: "Delete", ariaLabel: `Delete: ${title(talk)}` },
    icon("bin"),
  );
  button.onclick = () => {
    if (!button.classList.contains("sure")) {
      button.classList.add("sure");
      button.replaceChildren("Delete?");
      setTimeout(() => showList(shown, acts), SURE);
      return;
    }
    forget(talk.id);
    if (own) acts.begin();
    else showList(shown, acts);
  };
  return button;
}

// Where there is little room the list lies over the page.
export function listenToSide(begin) {
  $("menu").onclick = () =>
    document.body.dataset.side === "open" ? closeSide() : openSide();
  $("shade").onclick = closeSide;
  $("side").onkeydown = ({ key }) => {
    if (key === "Escape") closeSide();
  };
  $("new").onclick = () => {
    closeSide();
    begin();
  };
}

function openSide() {
  document.body.dataset.side = "open";
  $("shade").hidden = false;
  $("menu").setAttribute("aria-expanded", "true");
  $("new").focus();
}

export function closeSide() {
  if (document.body.dataset.side !== "open") return;
  delete document.body.dataset.side;
  $("shade").hidden = true;
  $("menu").setAttribute("aria-expanded", "false");
  $("menu").focus();
}

// The conversation stays at its end while text comes, until its reader scrolls up.

import { $ } from "./dom.js";

const NEAR = 48; // pixels from the end that count as the end
let following = true;

export function listenToScrolling() {
  const box = $("scroll");
  box.addEventListener("scroll", () =>
    set(box.scrollHeight - box.scrollTop - box.clientHeight < NEAR),
  );
  new ResizeObserver(keepUp).observe(box);
  new ResizeObserver(keepUp).observe($("talk"));
  $("latest").onclick = toEnd;
}

function set(follow) {
  following = follow;
  $("latest").hidden = follow;
}

export function keepUp() {
  if (following) $("scroll").scrollTop = $("scroll").scrollHeight;
}

export function toEnd() {
  set(true);
  keepUp();
}

// What is looked at: a turn, and perhaps a sample.

export let cursor = 0;
export let chosen = -1;

export function moveCursor(t) {
  cursor = t;
}

export function setChosen(s) {
  chosen = s;
}

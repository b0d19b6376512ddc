// In which row a sequence is drawn.

import { lives } from "./lives.js";
import { samples } from "./run.js";

// Up to so many samples have a row each; of more, later ones take over the rows of those
// that have ended, so that there are as many rows as were ever there at once.
const OWN_ROWS = 48;

export const lanes = []; // the samples of each row, in order of arrival
export const sharesRows = () => samples > OWN_ROWS;

export function assignLanes() {
  const until = []; // when each row is free again
  lives.forEach((life, s) => {
    const free = sharesRows() ? until.findIndex((end) => end <= life.born) : -1;
    life.lane = free < 0 ? lanes.length : free;
    until[life.lane] = life.died;
    (lanes[life.lane] ??= []).push(s);
  });
}

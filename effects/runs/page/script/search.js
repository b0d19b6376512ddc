// Finding a request by a part of its id.

import { $, el } from "./dom.js";
import { count } from "./format.js";
import { choose } from "./navigation.js";
import { brief, sample, samples, text } from "./run.js";

const FOUND = 8; // that are listed

export function find(query) {
  const wanted = query.trim().toLowerCase();
  const found = wanted ? matches(wanted) : [];
  const buttons = found.slice(0, FOUND).map(({ s }) => {
    const open = () => {
      find("");
      choose(s, true);
    };
    const title = text(sample.id[s]);
    return el("button", { onclick: open, title }, `request ${brief(s)}`);
  });
  let rest = "";
  if (found.length > FOUND) rest = `and ${count(found.length - FOUND)} more`;
  if (wanted && !found.length) rest = "no request has this in its id";
  if (rest) buttons.push(el("span", { className: "soft" }, rest));
  $("found").replaceChildren(...buttons);
}

// Best first: the very id, those that begin with it, those that hold it.
function matches(wanted) {
  const found = [];
  for (let s = 0; s < samples; s++) {
    const at = text(sample.id[s]).toLowerCase().indexOf(wanted);
    if (at < 0) continue;
    const isWhole = text(sample.id[s]).length === wanted.length;
    found.push({ s, rank: isWhole ? 0 : 1 + (at > 0) });
  }
  return found.sort((one, other) => one.rank - other.rank || one.s - other.s);
}

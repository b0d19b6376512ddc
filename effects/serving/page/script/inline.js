// What is inside a line of Markdown: code, strong and emphasised words, links.

import { el } from "./dom.js";

const DEEPEST = 8; // of marks within marks
const LONGEST = 10_000; // characters of a text in which marks are looked for
const SAFE = /^(?:https?:\/\/|mailto:)/i;

// The earliest of these in a text is made first; what is in it may hold others.
const marks = [
  {
    find: /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)/,
    make: ([, , text]) => el("code", {}, text),
  },
  { find: /\\([\\`*_{}[\]()#+\-.!|~<>])/, make: ([, char]) => char },
  {
    find: /!?\[([^\]\n]*)\]\( *<?([^\s()<>]*(?:\([^\s()]*\)[^\s()<>]*)*)>?( +"[^"]*")?\)/,
    make: link,
  },
  {
    find: /\bhttps?:\/\/[^\s<>"'`]*[^\s<>"'`.,;:!?)\]*]/,
    make: ([url]) => anchor(url, url),
  },
  {
    find: /\*\*(?=\S)([\s\S]*?\S)\*\*(?!\*)/,
    make: ([, text], depth) => el("strong", {}, ...inline(text, depth)),
  },
  {
    find: /(?<![\w*])\*(?=[^\s*])([^*]*[^\s*])\*(?![\w*])/,
    make: ([, text], depth) => el("em", {}, ...inline(text, depth)),
  },
  {
    find: /~~(?=\S)([\s\S]*?\S)~~/,
    make: ([, text], depth) => el("s", {}, ...inline(text, depth)),
  },
];

// Text and elements for a text with marks in it.
export function inline(text, depth = 0) {
  const made = [];
  let rest = text;
  while (rest) {
    const found = depth < DEEPEST && text.length <= LONGEST ? first(rest) : null;
    if (!found) break;
    if (found.match.index) made.push(rest.slice(0, found.match.index));
    made.push(found.make(found.match, depth + 1));
    rest = rest.slice(found.match.index + found.match[0].length);
  }
  return rest ? [...made, rest] : made;
}

function first(text) {
  let best = null;
  for (const { find, make } of marks) {
    const match = find.exec(text);
    if (match && (!best || match.index < best.match.index)) best = { match, make };
  }
  return best;
}

// Pictures are not loaded: who asks for one sees where it would be.
function link([whole, words, url], depth) {
  if (!SAFE.test(url)) return whole;
  return anchor(url, ...(words ? inline(words, depth) : [url]));
}

function anchor(url, ...words) {
  return el("a", { href: url, target: "_blank", rel: "noopener noreferrer" }, ...words);
}

// Markdown as elements, made for text that is still being written.
//
// Text becomes blocks, and each block elements: never markup, so that nothing in it can
// run or load anything. While an answer grows only its last blocks change; those before
// stay the elements they were. An underscore is one, as in __init__, and never emphasis;
// spaces and line ends are kept, as in source that nobody has fenced.

import { code } from "./code.js";
import { el } from "./dom.js";
import { inline } from "./inline.js";

const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^(#{1,6}) +(.+?)(?: +#+)? *$/;
const RULE = /^ {0,3}(?:(?:\* *){3,}|(?:- *){3,}|(?:_ *){3,})$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)]) +(.*)$/;
const QUOTE = /^ {0,3}> ?/;
const TABLE_RULE = /^ *\|? *:?-+:? *(?:\| *:?-+:? *)*\|? *$/;
const DEEPEST = 8; // of quotes and lists within each other
const LOWEST = 3; // headings in an answer are below those of the page
// What an answer begins with that is source and nothing else.
const SOURCE =
  /^(?:(async )?def \w|class \w|import \w|from [\w.]+ import |#include|@\w+\n|"""| {4})/;

// Show text in an element, leaving alone what has not changed.
export function render(into, text) {
  const blocks = isSource(text)
    ? [{ kind: "code", lines: text.split("\n"), name: "" }]
    : split(text);
  const shown = into.shown ?? [];
  const same = blocks.findIndex((block, i) => signature(block) !== shown[i]);
  const from = same < 0 ? blocks.length : same;
  const kept = from + (grown(into.children[from], blocks[from]) ? 1 : 0);
  while (into.childNodes.length > kept) into.lastChild.remove();
  into.append(...blocks.slice(kept).map((block) => element(block, 0)));
  into.shown = blocks.map(signature);
}

// Code that grows keeps its element, and with it where it was scrolled to.
function grown(there, block) {
  if (block?.kind !== "code" || there?.dataset.code !== block.name) return false;
  there.querySelector("code").textContent = block.lines.join("\n");
  return true;
}

export function isSource(text) {
  return SOURCE.test(text) && !text.includes("```");
}

function signature({ kind, name, lines }) {
  return `${kind} ${name ?? ""}\n${lines.join("\n")}`;
}

// Blocks of some lines: {kind, lines} and what else a kind needs.
function split(text) {
  const lines = text.split("\n");
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    const kind = kinds.find(({ begins }) => begins(lines, at));
    const end = kind.end(lines, at);
    const block = kind.block(lines.slice(at, end));
    if (block) blocks.push({ kind: kind.name, ...block });
    at = end;
  }
  return blocks;
}

const alone = (_, at) => at + 1;

const kinds = [
  {
    name: "blank",
    begins: (lines, at) => !lines[at].trim(),
    end: alone,
    block: () => null,
  },
  {
    name: "code",
    begins: (lines, at) => FENCE.test(lines[at]),
    end: (lines, at) => {
      const [, , fence] = FENCE.exec(lines[at]);
      const close = lines.findIndex((line, i) => i > at && closes(line, fence));
      return close < 0 ? lines.length : close + 1;
    },
    block: (lines) => {
      const [, indent, fence, name] = FENCE.exec(lines[0]);
      const closed = lines.length > 1 && closes(lines.at(-1), fence);
      const inner = lines.slice(1, closed ? -1 : undefined);
      const less = new RegExp(`^ {0,${indent.length}}`);
      return {
        lines: inner.map((line) => line.replace(less, "")),
        name: name.trim().split(" ")[0],
      };
    },
  },
  {
    name: "heading",
    begins: (lines, at) => HEADING.test(lines[at]),
    end: alone,
    block: (lines) => ({ lines }),
  },
  {
    name: "rule",
    begins: (lines, at) => RULE.test(lines[at]),
    end: alone,
    block: (lines) => ({ lines }),
  },
  {
    name: "table",
    begins: (lines, at) =>
      lines[at].includes("|") &&
      TABLE_RULE.test(lines[at + 1] ?? "") &&
      lines[at + 1].includes("|"),
    end: (lines, at) => until(lines, at + 2, (line) => !line.includes("|")),
    block: (lines) => ({ lines }),
  },
  {
    name: "quote",
    begins: (lines, at) => QUOTE.test(lines[at]),
    end: (lines, at) => until(lines, at, (line) => !QUOTE.test(line)),
    block: (lines) => ({ lines }),
  },
  {
    name: "list",
    begins: (lines, at) => ITEM.test(lines[at]),
    end: listEnd,
    block: (lines) => ({ lines }),
  },
  {
    name: "paragraph",
    begins: () => true,
    end: (lines, at) =>
      until(lines, at + 1, (_, i) =>
        kinds.slice(0, -1).some(({ begins }) => begins(lines, i)),
      ),
    block: (lines) => ({ lines }),
  },
];

function closes(line, fence) {
  const trimmed = line.trim();
  return trimmed.length >= fence.length && trimmed === fence[0].repeat(trimmed.length);
}

function until(lines, from, stop) {
  const found = lines.findIndex((line, i) => i >= from && stop(line, i));
  return found < 0 ? lines.length : found;
}

// A list goes on through blank lines, if an item or something indented follows.
function listEnd(lines, at) {
  let i = at + 1;
  for (;;) {
    let next = i;
    while (next < lines.length && !lines[next].trim()) next++;
    const goesOn =
      next < lines.length && (ITEM.test(lines[next]) || /^ {2,}/.test(lines[next]));
    if (!goesOn || (next > i && RULE.test(lines[next]))) return i;
    i = next + 1;
  }
}

function element(block, depth) {
  return makers[block.kind](block, depth);
}

const makers = {
  code: ({ lines, name }) => code(lines.join("\n"), name),
  heading: ({ lines }) => {
    const [, marks, words] = HEADING.exec(lines[0]);
    return el(`h${Math.min(6, marks.length + LOWEST - 1)}`, {}, ...inline(words));
  },
  rule: () => el("hr"),
  table,
  quote: ({ lines }, depth) =>
    el(
      "blockquote",
      {},
      ...inner(
        lines.map((line) => line.replace(QUOTE, "")),
        depth,
      ),
    ),
  list,
  paragraph: ({ lines }) => el("p", {}, ...inline(lines.map(atMargin).join("\n"))),
};

// Few spaces in front mean nothing; many are the indentation of source.
function atMargin(line) {
  return line.replace(/^ {1,3}(?! )/, "");
}

function inner(lines, depth) {
  const text = lines.join("\n");
  return depth < DEEPEST
    ? split(text).map((block) => element(block, depth + 1))
    : [el("p", {}, text)];
}

function list({ lines }, depth) {
  const items = [];
  const [, indent, mark] = ITEM.exec(lines[0]);
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && found[1].length <= indent.length + 1) {
      items.push({ lines: [found[3]], margin: line.length - found[3].length });
    } else {
      const { lines: own, margin } = items.at(-1);
      own.push(line.slice(Math.min(margin, line.search(/\S|$/))));
    }
  }
  const ordered = /\d/.test(mark);
  const made = el(
    ordered ? "ol" : "ul",
    {},
    ...items.map((item) => el("li", {}, ...tight(inner(item.lines, depth)))),
  );
  if (ordered) made.start = parseInt(mark, 10);
  return made;
}

// An item's first paragraph stands on the line of its mark.
function tight(elements) {
  return elements.flatMap((one, i) =>
    i === 0 && one.tagName === "P" ? [...one.childNodes] : [one],
  );
}

function table({ lines }) {
  const [head, rule, ...rows] = lines.map(cells);
  const sides = rule.map((cell) =>
    /^:?-+:$/.test(cell) ? (cell.startsWith(":") ? "center" : "right") : "left",
  );
  const row = (tag) => (values) =>
    el(
      "tr",
      {},
      ...sides.map((side, i) => el(tag, { className: side }, ...inline(values[i] ?? ""))),
    );
  const made = el(
    "table",
    {},
    el("thead", {}, row("th")(head)),
    el("tbody", {}, ...rows.map(row("td"))),
  );
  return el("div", { className: "table" }, made);
}

function cells(line) {
  const trimmed = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  return trimmed.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

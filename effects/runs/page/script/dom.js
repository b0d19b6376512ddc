// Making elements. What a run says is only ever set as text, never as markup.

export const root = document.documentElement;
export const $ = (id) => document.getElementById(id);

export function el(tag, properties, ...inside) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...inside.filter((one) => one !== ""));
  return made;
}

export function item(words, look = "") {
  return el("li", { className: look }, ...words);
}

export function list(title, items, most = 40) {
  if (!items.length) return "";
  const shown = items.slice(0, most);
  if (items.length > most) shown.push(item([`and ${items.length - most} more`]));
  return el("div", {}, el("h3", {}, title), el("ul", {}, ...shown));
}

// One bar out of parts, each as wide as its share; the names are classes, and colors.
export function bar(parts) {
  const made = el("div", { className: "bar" });
  for (const [name, size] of Object.entries(parts)) {
    if (size > 0)
      made.appendChild(el("i", { className: name })).style.flex = String(size);
  }
  return made;
}

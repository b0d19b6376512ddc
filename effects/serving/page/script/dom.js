// Making elements. What a model or a server says is only ever set as text.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

export function el(tag, properties = {}, ...inside) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...inside);
  return made;
}

export function svg(tag, attributes = {}, ...inside) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...inside);
  return made;
}

export function icon(name) {
  return svg("svg", { class: "icon", "aria-hidden": "true" }, use(name));
}

function use(name) {
  return svg("use", { href: `#icon-${name}` });
}

export function changeIcon(button, name) {
  button.querySelector("use").setAttribute("href", `#icon-${name}`);
}

// A button that is an icon; its words are for who hovers, and who listens.
export function tool(name, words, act) {
  const button = el(
    "button",
    { className: "quiet tool", title: words, type: "button" },
    icon(name),
  );
  button.setAttribute("aria-label", words);
  button.onclick = () => act(button);
  return button;
}

// Said to who cannot see that something has happened.
export function say(words) {
  $("said").textContent = words;
}

const SHOWN = 1500; // milliseconds for which a button says that it has copied

export async function copy(text, button) {
  const copied = await put(text);
  changeIcon(button, copied ? "done" : "copy");
  say(copied ? "Copied" : "The browser does not let this page copy");
  setTimeout(() => changeIcon(button, "copy"), SHOWN);
}

async function put(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Over plain HTTP from another machine there is no clipboard but the old way.
    const area = el("textarea", { value: text, className: "unseen" });
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    return copied;
  }
}

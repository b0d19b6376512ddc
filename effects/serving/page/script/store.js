// What this browser keeps: conversations, each under a name of its own, and settings.
//
// A conversation is {id, changed, messages}; a message is {role, content}, and of an
// answer also {about, error}, and {thought, calls} if there are any. Two tabs may have the
// page open: each writes only the conversations that it changes.

const TALK = "minfer.talk.";
const SETTINGS = "minfer.settings";
const TITLE = 60; // characters
const known = new Map(); // conversations that were read or written, by name

export const DEFAULTS = {
  system: "",
  temperature: "",
  top_p: "",
  max_tokens: "",
  seed: "",
  markdown: true,
};

export function newTalk() {
  const random = Math.random().toString(36).slice(2, 10);
  return {
    id: `${Date.now().toString(36)}-${random}`,
    changed: Date.now(),
    messages: [],
  };
}

// All conversations, the last changed first; each is one object, whoever asks.
export function talks() {
  return Object.keys(localStorage)
    .filter((name) => name.startsWith(TALK))
    .map((name) => known.get(name) ?? remember(name, read(name)))
    .filter((talk) => Array.isArray(talk?.messages))
    .sort((one, other) => other.changed - one.changed);
}

function remember(name, talk) {
  known.set(name, talk);
  return talk;
}

// Another tab has written what is kept under a name.
export function changedElsewhere(name) {
  known.delete(name);
}

export function save(talk) {
  remember(TALK + talk.id, talk);
  talk.changed = Date.now();
  const text = JSON.stringify(talk);
  for (;;) {
    try {
      localStorage.setItem(TALK + talk.id, text);
      return;
    } catch {
      // There is no room: the oldest goes, or this one is not kept.
      const oldest = talks().findLast(({ id }) => id !== talk.id);
      if (!oldest) return;
      forget(oldest.id);
    }
  }
}

export function forget(id) {
  known.delete(TALK + id);
  localStorage.removeItem(TALK + id);
}

export function title(talk) {
  const first = talk.messages.find(({ role }) => role === "user")?.content.trim() ?? "";
  const line = first.split("\n", 1)[0];
  return line.length > TITLE
    ? `${line.slice(0, TITLE - 1)}…`
    : line || "New conversation";
}

// Whether a message came to nothing: a question that was refused, or else failed before
// a word of an answer came, or the answer that says so. Later questions leave both out.
export function unanswered(messages, message) {
  const at = messages.indexOf(message);
  const answer = message.role === "user" ? messages[at + 1] : message;
  return Boolean(answer?.error && !answer.content);
}

export function settings() {
  return { ...DEFAULTS, ...read(SETTINGS) };
}

export function keepSettings(values) {
  localStorage.setItem(SETTINGS, JSON.stringify(values));
}

function read(name) {
  try {
    return JSON.parse(localStorage.getItem(name));
  } catch {
    return null;
  }
}

// One answer, from the request to its end: text as it comes, and how long it took.
//
// An answer's `about` is {first, seconds, thinking, tokens, exact, finish, cached, prompt,
// waited}: times in seconds as this browser measured them, tokens counted by the server
// once the answer is whole and, before, by how many chunks came.

import { ask, chunks } from "./api.js";
import { news, request } from "./asking.js";
import { save } from "./store.js";

const SAVE_EVERY = 1000; // milliseconds, while text comes
const running = new Map(); // by conversation: what aborts its answer

export function isRunning(talk) {
  return running.has(talk.id);
}

export function stop(talk) {
  running.get(talk.id)?.abort();
}

// Write the answer `message` of a conversation; `changed` is called whenever it did.
export async function write(talk, message, changed) {
  const aborter = new AbortController();
  running.set(talk.id, aborter);
  const clock = begin(message);
  changed();
  try {
    const { path, body } = await request(talk.messages, message);
    const response = await ask(path, { body, signal: aborter.signal });
    let saved = performance.now();
    for await (const chunk of chunks(response)) {
      take(message, news(chunk), clock);
      if (performance.now() - saved > SAVE_EVERY) {
        save(talk);
        saved = performance.now();
      }
      changed();
    }
  } catch (error) {
    if (error.name === "AbortError") message.about.finish = "stopped";
    else message.error = inWords(error);
  } finally {
    running.delete(talk.id);
    save(talk);
    changed();
  }
}

function begin(message) {
  message.error = "";
  message.about = {
    first: null,
    seconds: 0,
    thinking: 0,
    tokens: 0,
    exact: false,
    finish: "",
    cached: 0,
    prompt: 0,
    waited: 0,
  };
  return performance.now();
}

function take(message, { text, thought, calls, finish, usage, timing }, clock) {
  const { about } = message;
  const passed = (performance.now() - clock) / 1000;
  if (text || thought || calls.length) {
    about.first ??= passed;
    about.seconds = passed;
    about.tokens += 1;
    message.content += text;
  }
  if (thought) {
    message.thought = (message.thought ?? "") + thought;
    about.thinking = passed - about.first;
  }
  for (const call of calls) takeCall(message, call);
  if (finish) about.finish = finish;
  if (usage) {
    about.tokens = usage.completion_tokens;
    about.prompt = usage.prompt_tokens;
    about.cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    about.exact = true;
  }
  if (timing)
    about.waited = Object.values(timing.queue_times ?? {}).reduce(
      (sum, one) => sum + one,
      0,
    );
}

// A call begins with its name; its arguments come in pieces.
function takeCall(message, { index, function: { name, arguments: more = "" } }) {
  message.calls ??= [];
  message.calls[index] ??= { name, arguments: "" };
  message.calls[index].arguments += more;
}

// What the server says of a prompt is, here, about a whole conversation.
function inWords({ message, code, param }) {
  if (code !== "context_length_exceeded") return message;
  const where = param === "max_tokens" ? " Max tokens is one of the settings." : "";
  return `${message}${where} Begin a new conversation, or edit an earlier message.`;
}

// How a conversation becomes a request, and what a chunk of the answer says.

import { ask } from "./api.js";
import { model } from "./server.js";
import { settings, unanswered } from "./store.js";

const COMPLETION = 256; // tokens of one, if nobody says how many
const BYTES = 4; // of UTF-8 for a unit of UTF-16, at most; a token has at least one
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];

// Where to ask, and for what, so that the answer `message` is written or goes on.
export async function request(messages, message) {
  const common = {
    model: model.id,
    stream: true,
    stream_options: { include_usage: true },
    timing: true,
  };
  const wishes = { ...common, ...numbers() };
  const before = messages.slice(0, messages.indexOf(message));
  if (!model.chat) {
    const prompt = before.at(-1).content + message.content;
    wishes.max_tokens ??= await completion(prompt);
    return { path: "v1/completions", body: { ...wishes, prompt } };
  }
  const system = settings().system.trim();
  const said = [
    ...(system ? [{ role: "system", content: system }] : []),
    ...before
      .filter(({ content, role }) => content || role === "user")
      .filter((one) => !unanswered(before, one))
      .map(({ role, content }) => ({ role, content })),
  ];
  if (message.content) {
    said.push({ role: "assistant", content: message.content });
    wishes.continue_final_message = true;
  }
  return { path: "v1/chat/completions", body: { ...wishes, messages: said } };
}

// How many tokens of a completion there is room for. A server refuses to be asked for
// more, so a long prompt is counted first.
async function completion(prompt) {
  const fits = Math.floor(model.max_model_len / 2);
  if (BYTES * prompt.length < fits) return Math.min(COMPLETION, fits);
  const counted = await (await ask("tokenize", { body: { prompt } })).json();
  return Math.max(1, Math.min(COMPLETION, model.max_model_len - counted.count));
}

function numbers() {
  const given = settings();
  const filled = NUMBERS.filter((name) => String(given[name]).trim() !== "");
  return Object.fromEntries(filled.map((name) => [name, Number(given[name])]));
}

// What is new in a chunk: text, thoughts before it, calls of tools, why it ended, and at
// last what it took.
export function news(chunk) {
  const choice = chunk.choices?.[0];
  return {
    text: choice?.delta?.content ?? choice?.text ?? "",
    thought: choice?.delta?.reasoning_content ?? "",
    calls: choice?.delta?.tool_calls ?? [],
    finish: choice?.finish_reason ?? "",
    usage: chunk.usage ?? null,
    timing: chunk.timing?.[0] ?? null,
  };
}

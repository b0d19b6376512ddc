// What an answer took, in words: tokens, pace, the time to its first, and why it ended.

import { percent, rate, seconds, tokens } from "./format.js";
import { model } from "./server.js";

const FEW = 2; // tokens before there is a rate to speak of
const LONG_WAIT = 0.05; // seconds in line that are worth a word
const NEARLY = 0.75; // of the context, from where on it is worth a word
const CUT_SHORT = ["length", "stopped"]; // ends after which there may be more
const ENDS = {
  length: "cut off at max tokens",
  full: "the context is full",
  stopped: "stopped",
  cancelled: "cancelled",
  error: "failed",
};

export function summary(about, busy) {
  if (!about?.tokens) return about?.finish === "stopped" ? "stopped" : "";
  const parts = [`${about.exact ? "" : "about "}${tokens(about.tokens)}`];
  const pace = speed(about);
  if (pace) parts.push(`${rate(pace)} tokens/s`);
  if (about.first !== null) parts.push(`first after ${seconds(about.first)}`);
  if (about.waited > LONG_WAIT) parts.push(`${seconds(about.waited)} of it in line`);
  const filled = full(about);
  if (filled > NEARLY && filled < 1) parts.push(`context ${percent(filled, 1)} full`);
  if (!busy && ENDS[end(about)]) parts.push(ENDS[end(about)]);
  return parts.join(" · ");
}

// How much of the context the conversation fills by now.
function full({ prompt, tokens: written }) {
  return (prompt + written) / model.max_model_len;
}

// Why an answer has ended; at the context's end nothing can go on.
function end(about) {
  return about?.finish === "length" && full(about) >= 1 ? "full" : about?.finish;
}

// Tokens a second, once writing had begun.
function speed({ tokens: written, first, seconds: passed }) {
  return written > FEW && passed > first ? (written - 1) / (passed - first) : 0;
}

export function details(about) {
  if (!about?.exact) return "";
  const cached = about.cached ? `, ${about.cached} of them from the prefix cache` : "";
  return `The prompt had ${tokens(about.prompt)}${cached}.`;
}

export function wasCutShort(about) {
  return CUT_SHORT.includes(end(about));
}

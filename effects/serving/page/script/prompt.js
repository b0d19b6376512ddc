// The prompt box: one prompt, its answer as it comes, and what that took.

import { request, chunks } from "./api.js";
import { $ } from "./dom.js";
import { seconds, tokens } from "./format.js";
import { model } from "./server.js";

const COMPLETION = 256; // tokens of one, unless another number is given
const ENDS = { length: "cut off at max tokens", stopped: "stopped" };
let writing = null; // what stops the answer that comes in

export function listenToPrompt() {
  if (!model.chat) {
    $("system-part").hidden = true; // it continues texts, and knows no roles
    $("input").placeholder = "The beginning of a text, which the model continues";
    $("max_tokens").value = Math.min(COMPLETION, Math.floor(model.max_model_len / 2));
  }
  $("form").onsubmit = (event) => {
    event.preventDefault();
    if (!writing) write($("input").value);
  };
  $("input").onkeydown = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    $("form").requestSubmit();
  };
  $("stop").onclick = () => writing?.abort();
}

async function write(prompt) {
  writing = new AbortController();
  for (const id of ["error", "thought", "answer", "took"]) $(id).textContent = "";
  showButtons();
  const begun = performance.now();
  const took = { count: 0, finish: "" };
  try {
    const path = model.chat ? "v1/chat/completions" : "v1/completions";
    const response = await request(path, { body: body(prompt), signal: writing.signal });
    for await (const chunk of chunks(response)) take(chunk, took);
  } catch (error) {
    if (error.name === "AbortError") took.finish = "stopped";
    else $("error").textContent = error.message;
  } finally {
    writing = null;
    showButtons();
    $("took").textContent = summary(took, (performance.now() - begun) / 1000);
  }
}

function body(prompt) {
  const most = $("max_tokens").valueAsNumber;
  const temperature = $("temperature").valueAsNumber; // NaN, if there is none
  const system = $("system").value.trim();
  const messages = [
    ...(system ? [{ role: "system", content: system }] : []),
    { role: "user", content: prompt },
  ];
  return {
    model: model.id,
    stream: true,
    stream_options: { include_usage: true },
    ...(most ? { max_tokens: most } : {}),
    ...(temperature >= 0 ? { temperature } : {}),
    ...(model.chat ? { messages } : { prompt }),
  };
}

// What a model writes is only ever added as text.
function take({ choices: [choice], usage }, took) {
  $("thought").append(choice?.delta?.reasoning_content ?? "");
  $("answer").append(choice?.delta?.content ?? choice?.text ?? "");
  took.finish = choice?.finish_reason ?? took.finish;
  took.count = usage?.completion_tokens ?? took.count;
}

function summary({ count, finish }, passed) {
  const parts = count ? [`${tokens(count)} in ${seconds(passed)}`] : [];
  return [...parts, ENDS[finish] ?? []].flat().join(" · ");
}

function showButtons() {
  $("stop").hidden = !writing;
  $("send").hidden = Boolean(writing);
  $("answer").ariaBusy = String(Boolean(writing));
}

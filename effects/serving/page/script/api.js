// Requests to the server, and its errors in words for people.

import { key, askForKey } from "./key.js";

export class Refused extends Error {
  constructor(words, status = 0) {
    super(words);
    this.status = status;
  }
}

// Paths have no slash in front, so that the page works behind a prefix, too.
export async function request(path, { body, signal } = {}) {
  let wrong = false;
  for (;;) {
    const response = await send(path, body, signal);
    if (response.status !== 401) {
      if (!response.ok) throw await refusal(response);
      return response;
    }
    if (!(await askForKey(wrong || key() !== ""))) {
      throw new Refused("The server needs an API key, and none was given.", 401);
    }
    wrong = true;
  }
}

async function send(path, body, signal) {
  const headers = {};
  if (key()) headers.Authorization = `Bearer ${key()}`;
  if (body) headers["Content-Type"] = "application/json";
  try {
    return await fetch(path, {
      method: body ? "POST" : "GET",
      body: body && JSON.stringify(body),
      headers,
      signal,
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The server cannot be reached. Is minfer still running?");
  }
}

async function refusal(response) {
  const body = await response.json().catch(() => ({}));
  const words = body.error?.message ?? `it answered with status ${response.status}`;
  return new Refused(`${opening(response)} ${sentence(words)}`, response.status);
}

function opening(response) {
  if (response.status === 503) return "The server cannot serve this now:";
  if (response.status >= 500) return "The server failed:";
  return "The server refused this:";
}

function sentence(words) {
  return /[.!?]$/.test(words) ? words : `${words}.`;
}

// The data of server-sent events, as they come.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const frames = (left + value).split("\n\n");
      left = frames.pop();
      for (const frame of frames) {
        for (const line of frame.split("\n")) {
          if (line.startsWith("data: ")) yield line.slice("data: ".length);
        }
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The connection to the server broke off.");
  } finally {
    reader.cancel().catch(() => {});
  }
}

// The chunks of a streamed answer, which the server marks as whole.
export async function* chunks(response) {
  for await (const data of events(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error)
      throw new Refused(`The server gave up: ${sentence(chunk.error.message)}`);
    yield chunk;
  }
  throw new Refused("The connection broke off before the answer was whole.");
}

// Reads lines of a type's name and a value, in JSON, and writes those that zod refuses,
// with its reason.
//
//     node zod_parse.mjs < lines

import { createInterface } from "node:readline";
import { schemas } from "./zod_types.mjs";

function refusal(name, value) {
  try {
    const parsed = schemas[name].safeParse(value);
    return parsed.success ? null : parsed.error.issues[0].message;
  } catch (error) {
    return `zod itself fails: ${error.message}`;
  }
}

for await (const line of createInterface({ input: process.stdin })) {
  const [name, value] = JSON.parse(line);
  const reason = refusal(name, value);
  if (reason !== null) console.log(JSON.stringify([name, value, reason]));
}

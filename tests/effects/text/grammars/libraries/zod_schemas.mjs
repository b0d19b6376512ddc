// Writes the JSON schemas of zod's types to standard output: by target, then by type.
// A type that zod cannot represent in JSON Schema is null.
//
//     node zod_schemas.mjs > zod_schemas.json

import * as z from "zod";
import { schemas } from "./zod_types.mjs";

const targets = ["draft-2020-12", "draft-07", "draft-04", "openapi-3.0"];

function written(type, target) {
  try {
    return z.toJSONSchema(type, { target, io: "input" });
  } catch {
    return null;
  }
}

const found = {};
for (const target of targets) {
  found[target] = {};
  for (const [name, type] of Object.entries(schemas)) {
    const schema = written(type, target);
    const same = JSON.stringify(found[targets[0]][name]?.properties);
    const repeated = schema !== null && JSON.stringify(schema.properties) === same;
    if (target === targets[0] || !repeated) found[target][name] = schema;
  }
}
const lines = (group) =>
  Object.entries(group).map(([name, schema]) =>
    `  ${JSON.stringify(name)}: ${JSON.stringify(schema)}`).join(",\n");
const groups = Object.entries(found).map(([target, group]) =>
  ` ${JSON.stringify(target)}: {\n${lines(group)}\n }`);
console.log(`{\n${groups.join(",\n")}\n}`);

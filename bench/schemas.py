"""JSON schemas by a seed: of the kinds that the public test suite has groups for."""

import json
import random
from collections.abc import Callable
from typing import Any

from attrs import define, field

Schema = dict[str, Any]
NAMES = ("id", "name", "size", "path", "mode", "lines", "ok", "next", "kind", "é")
FORMATS = ("date", "time", "uuid", "ipv4", "email")
PATTERNS = ("^[a-z]{1,8}$", "^v[0-9]+\\.[0-9]{1,2}$", "^(GET|PUT) /[a-z/]{1,9}$", "^#")
MAX_DEPTH = 3


@define
class Maker:
    """Makes schemas, and counts which keywords are in them."""

    rng: random.Random
    used: dict[str, int] = field(factory=dict)

    def schema(self) -> Schema:
        """One schema: an object at the top, as clients ask for, or anything."""
        schema = self.object(0) if self.rng.random() < 0.7 else self.any(0)
        if self.rng.random() < 0.15:
            schema = self.referring(schema)
        for word in json.dumps(schema).split('"')[1::2]:
            self.used[word] = self.used.get(word, 0) + 1
        return schema

    def any(self, depth: int) -> Schema:
        leaves: list[Callable[[int], Schema]] = [
            self.string,
            self.number,
            self.constant,
            self.several_types,
        ]
        inner: list[Callable[[int], Schema]] = [
            self.object,
            self.array,
            self.any_of,
            self.one_of,
            self.all_of,
        ]
        return self.rng.choice(leaves if depth >= MAX_DEPTH else leaves + inner)(depth)

    def string(self, _: int) -> Schema:
        match self.rng.randrange(4):
            case 0:
                return {"type": "string", "format": self.rng.choice(FORMATS)}
            case 1:
                pattern = self.rng.choice(PATTERNS)
                return {"type": "string", "pattern": pattern, "maxLength": 20}
            case 2:
                low = self.rng.randrange(4)
                return {"type": "string", "minLength": low, "maxLength": low + 6}
            case _:
                return {"type": "string", "maxLength": 12}

    def number(self, _: int) -> Schema:
        low = self.rng.randrange(-50, 500)
        kind = self.rng.choice(("integer", "number"))
        match self.rng.randrange(4):
            case 0:
                return {"type": kind, "minimum": low, "maximum": low + 90}
            case 1:
                above, below = low, low + 40
                return {
                    "type": kind,
                    "exclusiveMinimum": above,
                    "exclusiveMaximum": below,
                }
            case 2:
                return {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 999}
            case _:
                return {"type": kind, "minimum": 0}

    def constant(self, _: int) -> Schema:
        values: list[Any] = ["a", "b c", "é\n", 5, -2.5, True, None, [1, "x"], {"k": 0}]
        if self.rng.random() < 0.3:
            return {"const": self.rng.choice(values)}
        return {"enum": self.rng.sample(values, self.rng.randrange(2, 6))}

    def several_types(self, _: int) -> Schema:
        kinds = ["string", "null", "boolean", "integer"]
        return {"type": self.rng.sample(kinds, 2), "maxLength": 8}

    def object(self, depth: int) -> Schema:
        names = self.rng.sample(NAMES, self.rng.randrange(1, 5))
        schema: Schema = {
            "type": "object",
            "properties": {name: self.any(depth + 1) for name in names},
            "required": self.rng.sample(names, self.rng.randrange(len(names) + 1)),
        }
        extra = {"type": "integer", "maximum": 9}
        match self.rng.randrange(4):
            case 0:  # numbers of properties can be bounded where all are required
                max_properties = len(names) + self.rng.randrange(3)
                bounds = {"minProperties": len(names), "maxProperties": max_properties}
                return (
                    schema | bounds | {"required": names, "additionalProperties": extra}
                )
            case 1:
                schema["patternProperties"] = {"^x_[a-z]{1,3}$": extra}
        return schema | {"additionalProperties": False}

    def array(self, depth: int) -> Schema:
        low = self.rng.randrange(3)
        schema: Schema = {"type": "array", "minItems": low, "maxItems": low + 3}
        if self.rng.random() < 0.3:
            first = [self.any(depth + 1), self.any(depth + 1)]
            return {**schema, "prefixItems": first, "items": self.any(depth + 1)}
        return {**schema, "items": self.any(depth + 1)}

    def any_of(self, depth: int) -> Schema:
        return {"anyOf": [self.any(depth + 1) for _ in range(self.rng.randrange(2, 4))]}

    def one_of(self, depth: int) -> Schema:
        """Of kinds that exclude each other, as only these can be enforced."""
        kinds = [self.string(depth), {"type": "null"}, {"type": "boolean"}]
        return {"oneOf": self.rng.sample(kinds, 2)}

    def all_of(self, depth: int) -> Schema:
        name = self.rng.choice(NAMES)
        object_schema = {"type": "object", "properties": {name: self.any(depth + 1)}}
        return {"allOf": [object_schema, {"required": [name]}, {"maxProperties": 2}]}

    def referring(self, inner: Schema) -> Schema:
        """A tree whose leaves are as `inner`."""
        tree = {
            "type": "object",
            "properties": {
                "leaf": {"$ref": "#/$defs/leaf"},
                "below": {
                    "type": "array",
                    "items": {"$ref": "#/$defs/tree"},
                    "maxItems": 2,
                },
            },
            "required": ["leaf"],
            "additionalProperties": False,
        }
        return {"$defs": {"leaf": inner, "tree": tree}, "$ref": "#/$defs/tree"}

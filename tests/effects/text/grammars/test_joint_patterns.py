"""Schemas with many patterns for one text are refused before they are compiled."""

import json
from typing import Any

import pytest

from minfer.effects.text.grammars.grammar_library import GrammarError
from minfer.effects.text.grammars.joint_patterns import MAX_JOINT_PATTERNS
from minfer.effects.text.grammars.schemas import check_schema


def patterns(count: int) -> list[dict[str, Any]]:
    return [{"pattern": f"a{{{number}}}"} for number in range(count)]


MANY = MAX_JOINT_PATTERNS + 1
HALF = MAX_JOINT_PATTERNS // 2 + 1
SCHEMAS: dict[str, dict[str, Any]] = {
    "in a row": {"allOf": patterns(MANY)},
    "beside one": {"pattern": "b", "allOf": patterns(MANY - 1)},
    "nested": {"allOf": [{"allOf": patterns(HALF)}, {"allOf": patterns(HALF)}]},
    "by reference": {
        "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}],
        "$defs": {"a": {"allOf": patterns(HALF)}},
    },
    "alternatives": {
        "allOf": [{"anyOf": patterns(2)} for _ in range(MANY)],
    },
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_many_patterns_of_one_text_are_refused(name: str) -> None:
    schema = dict(SCHEMAS[name])
    definitions = schema.pop("$defs", {})
    document = {"type": "object", "properties": {"p": schema}, "$defs": definitions}
    with pytest.raises(GrammarError, match="patterns must match one text"):
        check_schema(json.dumps(document), "schema")
    lenient = json.loads(check_schema(json.dumps(document), "schema", lenient=True))
    assert "p" in lenient["properties"]


def test_as_many_as_allowed_are_taken() -> None:
    schema = {"type": "string", "allOf": patterns(MAX_JOINT_PATTERNS)}
    assert check_schema(json.dumps(schema), "schema")


def test_alternatives_within_themselves_are_counted_once() -> None:
    tree = {"anyOf": [{"type": "string", "pattern": "a"}, {"$ref": "#/$defs/list"}]}
    schema = {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": tree,
            "list": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
        },
    }
    assert check_schema(json.dumps(schema), "schema")


def test_a_long_chain_of_references_is_counted() -> None:
    chain: dict[str, Any] = {
        str(number): {"$ref": f"#/$defs/{number + 1}"} for number in range(3000)
    }
    schema = {"$ref": "#/$defs/0", "$defs": {**chain, "3000": {"type": "string"}}}
    assert check_schema(json.dumps(schema), "schema")

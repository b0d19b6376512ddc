"""A schema whose values would have to be within themselves has none."""

import json
from typing import Any

import pytest

from minfer.effects.text.grammars.grammar_library import GrammarError
from minfer.effects.text.grammars.schemas import check_schema
from tests.effects.text.grammars.bundled import takes_value

SELF = {"$ref": "#/$defs/a"}
OTHER = {"$ref": "#/$defs/b"}


def node(child: Any, *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"n": child}, "required": [*required]}


@pytest.mark.parametrize(
    "definitions",
    [
        {"a": SELF},
        {"a": OTHER, "b": SELF},
        {"a": {"allOf": [{}, SELF]}},
        {"a": {"anyOf": [SELF]}},
        {"a": {"allOf": [{"anyOf": [OTHER]}]}, "b": {"allOf": [SELF]}},
        {"a": node(SELF, "n")},
        {"a": node(OTHER, "n"), "b": node(SELF, "n")},
        {"a": {"$ref": "#"}},
    ],
)
def test_it_is_refused(definitions: dict[str, Any]) -> None:
    schema = json.dumps({"$defs": definitions, "$ref": "#/$defs/a"})
    for lenient in (False, True):
        with pytest.raises(
            GrammarError, match="json: has no value, as each would"
        ) as raised:
            check_schema(schema, "json", lenient=lenient)
        assert raised.value.param == "json"


@pytest.mark.parametrize(
    ("definition", "value"),
    [
        (node(SELF), {"n": {"n": {}}}),
        (node({"anyOf": [SELF, {"type": "null"}]}, "n"), {"n": {"n": None}}),
        (node({"type": "array", "items": SELF}, "n"), {"n": [{"n": []}]}),
        ({"type": ["object", "null"], "properties": {"n": SELF}}, {"n": None}),
    ],
)
def test_one_that_can_end_is_taken(definition: dict[str, Any], value: Any) -> None:
    assert takes_value({"$defs": {"a": definition}, **SELF}, value)


def test_a_reference_by_name_is_none() -> None:
    named = {"$defs": {"a": {"$anchor": "name", "type": "string"}}}
    schema = {**named, **node({"$ref": "#name"}, "n")}
    assert takes_value(schema, {"n": "x"})


def test_a_long_chain_is_none() -> None:
    chain = {str(number): {"$ref": f"#/$defs/{number + 1}"} for number in range(2000)}
    schema = {"$defs": {**chain, "2000": {"const": 1}}, "$ref": "#/$defs/0"}
    assert check_schema(json.dumps(schema), "json")

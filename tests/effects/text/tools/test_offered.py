"""Which parameters are no text, as their schemas say."""

from typing import Any

import pytest

from minfer.effects.text.tools.offered import typed_parameters

DEFS = {
    "number": {"type": "number"},
    "name": {"type": "string"},
    "loop": {"$ref": "#/$defs/loop"},
}


@pytest.mark.parametrize(
    ("schema", "typed"),
    [
        ({"type": "string"}, False),
        ({"type": ["string", "null"]}, False),
        ({"type": ["integer", "null"]}, True),
        ({"type": "object"}, True),
        ({"anyOf": [{"type": "null"}, {"type": "string"}]}, False),
        ({"oneOf": [{"type": "null"}, {"type": "integer"}]}, True),
        ({"$ref": "#/$defs/number"}, True),
        ({"$ref": "#/$defs/name"}, False),
        ({"$ref": "#/$defs/loop"}, False),
        ({"$ref": "#/$defs/nowhere/at/all"}, False),
        ({"$ref": "https://elsewhere"}, False),
        ({"$ref": 5}, False),
        ({"enum": ["a", 1]}, False),
        ({"enum": [1, 2]}, True),
        ({"const": 1}, True),
        ({"const": "a"}, False),
        ({"description": "whatever"}, False),
        (True, False),
    ],
)
def test_what_cannot_be_text(schema: Any, typed: bool) -> None:
    tools = {"f": {"properties": {"x": schema}, "$defs": DEFS}, "g": None}
    assert list(typed_parameters(tools)) == ([("f", "x")] if typed else [])


def test_schemas_that_are_none() -> None:
    assert not list(typed_parameters({"f": {"properties": [1]}, "g": {}}))

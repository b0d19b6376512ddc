"""Schemas exclude each other only where no value matches both."""

from typing import Any

import pytest

from minfer.effects.text.grammars.disjoint_schemas import all_disjoint
from tests.quick import at_most

TEXT = {"type": "string"}
NUMBER = {"type": "number"}


def kind(*values: Any, **keywords: Any) -> Any:
    """An object that says what it is."""
    properties = {"kind": {"enum": [*values]}}
    return {"type": "object", "properties": properties, "required": ["kind"], **keywords}


@pytest.mark.parametrize(
    ("schemas", "disjoint"),
    [
        ([TEXT, NUMBER], True),
        ([TEXT, TEXT], False),
        ([{"type": "integer"}, NUMBER], False),
        ([{"type": ["string", "null"]}, {"type": ["number", "null"]}], False),
        ([{**TEXT, "nullable": True}, {**NUMBER, "nullable": True}], False),
        ([{"const": 1}, {"const": 2}, {"enum": ["a", None]}], True),
        ([{"const": 1}, {"const": 1.0}], False),
        ([{"const": 1}, {"const": True}], True),
        ([{"const": {"a": 1, "b": 2}}, {"const": {"b": 2, "a": 1}}], False),
        ([kind("a"), kind("b", "c")], True),
        ([kind("a"), kind("b", "a")], False),
        ([kind("a"), {**kind("b"), "required": []}], True),
        ([{**kind("a"), "required": []}, {**kind("b"), "required": []}], False),
        ([kind("a"), {"type": "object", "additionalProperties": False}], True),
        ([kind("a"), {"type": "object"}], False),
        ([{**kind("a"), "type": ["object", "null"]}, kind("b")], True),
        ([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], True),
        ([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], False),
        ([{"$ref": "#/$defs/loop"}, TEXT], False),
        ([{"$ref": "#/$defs/none"}, TEXT], False),
        ([{"anyOf": [TEXT, {"const": 1}]}, {"const": 2}, {"type": "null"}], True),
        ([{"anyOf": [TEXT, NUMBER]}, {"const": 2}], False),
        ([{"allOf": [TEXT, {"minLength": 1}]}, NUMBER], True),
        ([True, TEXT], False),
        ([False, True], True),
        ([{}, TEXT], False),
        ([3, TEXT], False),
        ([], True),
    ],
)
def test_which_schemas_are_disjoint(schemas: list[Any], disjoint: bool) -> None:
    loop = {"anyOf": [{"$ref": "#/$defs/loop"}, TEXT]}
    root = {"$defs": {"a": kind("a"), "b": kind("b"), "loop": loop}}
    assert all_disjoint(schemas, root) == disjoint


def test_many_are_compared_soon() -> None:
    schemas = [kind(str(number), items={"const": number}) for number in range(500)]
    with at_most(2):
        assert all_disjoint(schemas, {})
        assert not all_disjoint([*schemas, kind("7")], {})


def test_many_alternatives_are_compared_soon() -> None:
    first = {"anyOf": [{"const": number} for number in range(100)]}
    second = {"anyOf": [{"const": number} for number in range(100, 200)]}
    third = {"anyOf": [{"const": number} for number in range(200, 900)]}
    with at_most(0.5):
        assert all_disjoint([first, second], {})
        assert not all_disjoint([first, third], {})  # as far as can be known soon


def test_many_values_are_compared_soon() -> None:
    lists = [{"enum": [*range(start, start + 100)]} for start in range(0, 6000, 100)]
    with at_most(0.5):
        assert all_disjoint(lists, {})

"""Arguments in tags: what a schema lets through, and what is refused."""

import json
from typing import Any

import pytest

from minfer.effects.text.grammars.grammar_library import GrammarError
from minfer.effects.text.tools.argument_forms import Callee
from minfer.effects.text.tools.argument_rules import ArgumentRules, ArgumentSchema
from minfer.effects.text.tools.forms import Calling
from minfer.effects.text.tools.marker_rules import MarkerRules
from minfer.effects.text.tools.table import TOOLS
from minfer.effects.text.tools.tag_forms import tag_form
from tests.effects.text.tools.test_forms import vocabulary
from tests.effects.text.tools.test_qwen_coder import call

SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "description": "where"},
        "kind": {"enum": ["a", "b c"]},
        "count": {"$ref": "#/$defs/count"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "list": {"type": "array", "items": {"type": "boolean"}},
    },
    "required": ["path"],
    "$defs": {"count": {"type": "integer", "minimum": 1}},
}


def takes(schema: dict[str, Any], *values: tuple[str, str]) -> bool:
    callee = Callee("f", json.dumps(schema))
    calling = Calling(
        format="qwen3_coder", callees=(callee,), must=True, token=lambda _: None
    )
    return vocabulary(marked=False).takes(call("f", *values), calling)


def form(name: str, schema: dict[str, Any], *, lenient: bool = False) -> ArgumentRules:
    written = TOOLS["qwen3_coder"].written
    assert written is not None
    marks = MarkerRules.of((), lambda _: None)
    arguments = ArgumentSchema(
        tool=name, number=0, root=schema, marks=marks, lenient=lenient
    )
    return tag_form(arguments, written.parameter)


@pytest.mark.parametrize(
    "values",
    [
        [("path", "x")],
        [("path", "")],
        [("path", "a\n</p> <parameter=x>\nb"), ("kind", "b c"), ("count", "12")],
        [("path", "x"), ("note", "null"), ("list", "[true, false]")],
    ],
)
def test_what_fits(values: list[tuple[str, str]]) -> None:
    assert takes(SCHEMA, *values)


@pytest.mark.parametrize(
    "values",
    [
        [],
        [("kind", "a")],
        [("path", "x"), ("kind", "c")],
        [("path", "x"), ("count", "0")],
        [("path", "x"), ("count", "some")],
        [("path", "x"), ("list", "[1]")],
        [("path", "x"), ("strange", "y")],
        [("count", "1"), ("path", "x")],
    ],
)
def test_what_does_not_fit(values: list[tuple[str, str]]) -> None:
    assert not takes(SCHEMA, *values)


def test_any_object_has_any_parameters() -> None:
    for values in ([], [("a", "1")], [("a", "x\ny"), ("b-c", "")]):
        assert takes({"type": "object"}, *values)
    assert not takes({"type": "object"}, ("a b", "1"))
    none = {"type": "object", "properties": {}, "additionalProperties": False}
    assert takes(none)
    assert not takes(none, ("a", "1"))


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"properties": {"a": {"type": "string", "maxLength": 3}}}, "f.a: a text cannot"),
        ({"properties": {"a": {"pattern": "x"}}}, "f.a: a text cannot"),
        ({"properties": {"a": {"type": "string", "format": "date"}}}, "f.a: a text"),
        ({"properties": {"a>b": {}}}, "'a>b' cannot be a name"),
        ({"minProperties": 1}, "'minProperties' cannot be enforced"),
        ({"required": ["a"]}, "'a' is required"),
    ],
)
def test_what_cannot_be_enforced(schema: dict[str, Any], says: str) -> None:
    with pytest.raises(GrammarError, match=says):
        form("f", {"type": "object", **schema})


def test_a_lenient_form_leaves_that_free() -> None:
    bounded = {"a": {"type": "string", "maxLength": 3}, "b": {"enum": ["x"]}}
    schema = {"type": "object", "properties": bounded, "minProperties": 1}
    callee = Callee("f", json.dumps(schema), lenient=True)
    calling = Calling(
        format="qwen3_coder", callees=(callee,), must=True, token=lambda _: None
    )
    bound = vocabulary(marked=False)
    assert bound.takes(call("f", ("a", "long text"), ("b", "x")), calling)
    assert not bound.takes(call("f", ("a", "long text"), ("b", "y")), calling)


@pytest.mark.parametrize("schema", [{"required": ["a"]}, {"properties": {"a>b": {}}}])
def test_a_lenient_form_of_no_names_takes_any(schema: dict[str, Any]) -> None:
    tool_form = form("f", {"type": "object", **schema}, lenient=True)
    assert tool_form.body == "tagged_any"

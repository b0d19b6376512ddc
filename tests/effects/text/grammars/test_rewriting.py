"""Keywords in the words of others: what values a schema allows stays the same."""

import json
from typing import Any

import jsonschema
import pytest

from minfer.effects.text.grammars.schemas import check_schema
from tests.effects.text.grammars.bundled import refusal, takes_value
from tests.quick import at_most


def checked(schema: Any, *, lenient: bool = False) -> Any:
    return json.loads(check_schema(json.dumps(schema), "json", lenient=lenient))


STRING = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"format": "password", **STRING}, "a", 1),
        ({"format": "made-up", "pattern": "^a+$", **STRING}, "aa", "b"),
        ({"contentEncoding": "base64", "contentMediaType": "a/b", **STRING}, "a", 1),
        ({"contentSchema": {"not": {"const": 1}}, **STRING}, "a", 1),
        ({"not": {}, "type": ["string", "null"]}, ..., "a"),
        ({"type": "object", "properties": {"a": {"not": {}}}}, {}, {"a": 1}),
        ({"not": False, **STRING}, "a", 1),
        ({"uniqueItems": True, "maxItems": 1, "type": "array"}, [1], [1, 2]),
        ({"propertyNames": STRING, "type": "object"}, {"a": 1}, 1),
        ({"propertyNames": True, "type": "object"}, {"a": 1}, 1),
        ({"propertyNames": False, "type": "object"}, {}, {"a": 1}),
        (
            {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": STRING},
            {"b": "x"},
            {"b": 1},
        ),
        ({"propertyNames": {"enum": ["a"]}, "type": "object"}, {"a": 1}, {"c": 1}),
        (
            {"propertyNames": {"pattern": "^a"}, "properties": {"b": {}, "ab": STRING}},
            {"ab": "x", "ac": 1},
            {"b": 1},
        ),
        ({"propertyNames": {"minLength": 2, "maxLength": 3}}, {"abc": 1}, {"abcd": 1}),
        (
            {"propertyNames": {"pattern": "[a-z]", "maxLength": 2}},
            {"a1": 1},
            {"a11": 1},
        ),
        (
            {"$defs": {"n": {"enum": ["a"]}}, "propertyNames": {"$ref": "#/$defs/n"}},
            {"a": 1},
            {"b": 1},
        ),
        (
            {"propertyNames": {"anyOf": [{"const": "a"}, {"const": "b"}]}},
            {"b": 1},
            {"c": 1},
        ),
        ({"type": "number", "maximum": 3.4e38, "minimum": -3.4e38}, 1.5, "a"),
        ({"oneOf": [{"const": 1}, {"const": "a"}]}, "a", 2),
        (
            {
                "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
                "$defs": {
                    name: {
                        "type": "object",
                        "properties": {"k": {"const": name}},
                        "required": ["k"],
                    }
                    for name in "ab"
                },
            },
            {"k": "b"},
            {"k": "c"},
        ),
        ({"pattern": "^(?=.{1,2}$)a*$", **STRING}, "aa", "aaa"),
        ({"pattern": "^(?!ab)a.$", "minLength": 1, **STRING}, "ac", "ab"),
        ({"format": "date", "minLength": 3, **STRING}, "2024-02-29", "2023-02-29"),
        ({"dependentRequired": {}, **STRING}, "a", 1),
    ],
)
def test_values_are_those_of_the_standard(schema: Any, right: Any, wrong: Any) -> None:
    reference = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.FormatChecker()
    )
    checked_schema = checked(schema)
    assert checked(checked_schema) == checked_schema
    if right is not ...:
        reference.validate(right)
        assert takes_value(schema, right)
    if wrong is not ...:
        assert not reference.is_valid(wrong)
        assert right is ... or not takes_value(schema, wrong)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string", "nullable": True}, [None, "a"], [1]),
        ({"type": "string", "nullable": False}, ["a"], [None]),
        ({"type": "string", "nullable": True, "enum": ["a"]}, ["a"], [None]),
        ({"type": "string", "nullable": True, "enum": [None]}, [None], ["a"]),
        ({"anyOf": [{"type": "string"}], "nullable": True}, ["a"], [None]),
        ({"type": ["string", "null"], "nullable": True}, [None], [1]),
    ],
)
def test_null_is_allowed_as_openapi_says(
    schema: Any, right: list[Any], wrong: list[Any]
) -> None:
    for value in right:
        assert takes_value(schema, value)
    for value in wrong:
        assert not takes_value(schema, value)


def test_comments_are_dropped_unless_something_refers_to_them() -> None:
    words = ["title", "description", "$comment", "deprecated", "readOnly", "example"]
    comments = dict.fromkeys([*words, "x-ours", "discriminator", "externalDocs"], "a")
    assert checked({**comments, "items": comments}) == {"items": {}}
    schema = {"$ref": "#/x-ours/a", "x-ours": {"a": {"const": 1}}, "title": "T"}
    assert checked(schema) == {"$ref": "#/x-ours/a", "x-ours": {"a": {"const": 1}}}


def test_one_schema_for_many_names_is_there_once() -> None:
    names = [f"name{number}" for number in range(40)]
    schema: Any = {"type": "string", "pattern": "a" * 40}
    for _ in range(6):
        schema = {"propertyNames": {"enum": names}, "additionalProperties": schema}
    assert len(json.dumps(checked(schema))) < 20_000
    assert takes_value({**schema, "type": "object"}, {"name1": {"name2": {}}})


@pytest.mark.parametrize(
    ("schema", "word", "remedy"),
    [
        ({"uniqueItems": True}, "uniqueItems", "set maxItems to 1"),
        ({"propertyNames": {"format": "email"}}, "propertyNames", "one pattern or"),
        (
            {"oneOf": [{"type": "integer"}, {"type": "number"}]},
            "oneOf",
            "say anyOf instead",
        ),
        (
            {"properties": {"b": {}}, "maxProperties": 2},
            "maxProperties",
            "require them, or drop it",
        ),
        ({"not": {"const": 1}}, "not", "say what is allowed instead"),
        ({"if": {}}, "if", "say anyOf instead"),
    ],
)
def test_a_refusal_names_the_keyword_the_path_and_the_remedy(
    schema: Any, word: str, remedy: str
) -> None:
    error = str(refusal(json={"properties": {"a": schema}}))
    assert f"the keyword {word!r} cannot be enforced" in error
    assert remedy in error
    assert error.endswith("(at /properties/a)")


@pytest.mark.parametrize(
    "schema",
    [
        {"uniqueItems": True, "type": "array"},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"oneOf": [{"type": "integer"}, {"type": "number"}], "anyOf": [{}]},
        {"if": {}, "then": {}, "else": False},
        {"patternProperties": {"(?<=a)b": False}, "additionalProperties": False},
        {"pattern": r"\bword\b"},
        {"const": 2**70},
        {"enum": [1e300, 2]},
        {"multipleOf": 1.234567891},
        {"propertyNames": {"format": "email"}, "type": "object"},
        {"unknown": 1, "minContains": 2},
        {"properties": {"a": {}, "b": {}}, "maxProperties": 1, "minProperties": 1},
        {"unevaluatedProperties": False, "contains": {"type": "null"}},
        {"x-guidance": {"lenient": True}},
    ],
)
def test_a_lenient_check_drops_what_cannot_be_enforced(schema: Any) -> None:
    document = {"properties": {"a": schema, "b": {"const": 1}}, "required": ["b"]}
    checked_schema = checked(document, lenient=True)
    assert checked(checked_schema) == checked_schema  # which is not lenient
    for value in (1, 2.5, "word", [1, 1], {"b": 1}, None):
        if jsonschema.Draft202012Validator(schema).is_valid(value):
            assert takes_value(checked_schema, {"a": value, "b": 1})
    assert not takes_value(checked_schema, {"b": 2})


def test_a_lenient_check_refuses_what_is_no_schema() -> None:
    for schema in ({"items": 3}, {"$ref": "#/$defs/none"}, {"nullable": 1}):
        with pytest.raises(ValueError, match="json: "):
            checked(schema, lenient=True)


def test_names_behind_many_references_are_read_soon() -> None:
    levels = {
        f"level{number}": {"anyOf": [{"$ref": f"#/$defs/level{number + 1}"}] * 20}
        for number in range(4)
    }
    schema = {
        "type": "object",
        "$defs": {**levels, "level4": {"enum": ["a"]}},
        "propertyNames": {"$ref": "#/$defs/level0"},
    }
    with at_most(0.5):
        checked_schema = json.loads(check_schema(json.dumps(schema), "json"))
    assert checked_schema["properties"] == {"a": True}


@pytest.mark.parametrize(
    "names",
    [
        *({word: 5} for word in ("pattern", "enum", "type", "format")),
        *({word: "x"} for word in ("minLength", "maxLength", "enum")),
    ],
)
def test_names_of_properties_have_keywords_of_their_types(names: dict[str, Any]) -> None:
    schema = {"type": "object", "propertyNames": names}
    (word,) = names
    assert f"{word} in propertyNames must be" in str(refusal(json=schema))
    lenient = check_schema(json.dumps(schema), "x", lenient=True)
    assert json.loads(lenient) == {"type": "object"}

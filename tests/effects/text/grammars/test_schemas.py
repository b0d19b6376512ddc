"""Of a schema everything is enforced, or the schema is refused."""

import json
from contextlib import suppress
from typing import Any

import pytest

from minfer.effects.text.grammars.grammar_library import GrammarError
from minfer.effects.text.grammars.schemas import check_schema
from tests.effects.text.grammars.bundled import refusal, takes_value
from tests.quick import at_most


def refused(schema: Any) -> str:
    with pytest.raises(GrammarError) as caught:
        check_schema(schema if isinstance(schema, str) else json.dumps(schema), "json")
    assert caught.value.param == "json"
    return str(caught.value)


@pytest.mark.parametrize(
    ("schema", "word", "place"),
    [
        ({"uniqueItems": True}, "uniqueItems", ""),
        ({"properties": {"a": {"not": {"type": "null"}}}}, "not", "/properties/a"),
        ({"items": {"items": {"contains": 1}}}, "contains", "/items/items"),
        ({"anyOf": [True, {"if": {}}]}, "if", "/anyOf/1"),
        ({"$defs": {"x": {"contains": {}}}}, "contains", "/$defs/x"),
        ({"x-guidance": {"lenient": True}}, "x-guidance", ""),
        ({"propertis": {}}, "propertis", ""),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired", ""),
        ({"unevaluatedProperties": False}, "unevaluatedProperties", ""),
    ],
)
def test_a_keyword_that_would_not_be_enforced_is_refused(
    schema: Any, word: str, place: str
) -> None:
    emitted = refused(schema)
    assert f"the keyword {word!r} cannot be enforced; " in emitted
    assert emitted.endswith(f" (at {place})") == bool(place)


@pytest.mark.parametrize(
    "text",
    [
        '{"const": -9223372036854775808}',
        '{"enum": [[-9223372036854775807]]}',
        '{"type": "integer", "minimum": -1e300, "maximum": -1e299}',
        '{"$ref": "#/default", "default": {"const": -9223372036854775296}}',
        '{"const": 1e999}',
        f'{{"const": {"9" * 4000}}}',
    ],
)
def test_numbers_that_take_the_compiler_with_them_are_refused(text: str) -> None:
    emitted = refused(text)
    assert "is too large" in emitted
    assert len(emitted) < 200


@pytest.mark.parametrize(
    "schema",
    [
        {"const": 2**53 + 1},
        {"enum": ["a", {"b": [-(2**53) - 1]}]},
        {"type": "integer", "minimum": 2**53 + 1},
    ],
)
def test_numbers_that_would_be_rounded_are_refused(schema: Any) -> None:
    assert "more digits than can be enforced" in refused(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 99999999},
        {"multipleOf": 9999.9999},
        {"allOf": [{"multipleOf": 0.97}, {"multipleOf": 89}, {"multipleOf": 8.3}]},
        {"$ref": "#/x-a", "x-a": {"multipleOf": 845819}},
        {"multipleOf": -99999999},
        {"multipleOf": 2**26},
        {"multipleOf": 1e-15 + 1},
    ],
)
def test_multiples_that_would_take_minutes_are_refused(schema: Any) -> None:
    assert "leave multipleOf out" in refused(schema)


@pytest.mark.long
@pytest.mark.parametrize("step", [86400, 1e6, 0.01, 2**10, 1e-5, 97, 0.35, 10_000])
def test_multiples_that_are_easy_to_tell(step: float) -> None:
    schemas: list[Any] = [{"multipleOf": 6}, {"multipleOf": 1000}, {"multipleOf": step}]
    assert takes_value({}, 1)  # the tokenizer is read now
    with at_most(4):  # 86,400 takes 1 s, the others 0.1 s
        assert takes_value({"prefixItems": schemas}, [12, 5000])
        assert not takes_value({"prefixItems": schemas}, [12, 5001])


def test_large_numbers_that_are_kept_are_taken() -> None:
    for number in (2**53, 2**60, -(10**18), 0.1):
        assert takes_value({"const": number}, number)
    assert takes_value({"const": 1, "default": 2**53 + 1}, 1)


@pytest.mark.parametrize("place", ["pattern", "patternProperties"])
def test_a_pattern_does_not_end_within_an_escape(place: str) -> None:
    wrong: Any = "a\\"
    right: Any = "a\\\\"
    if place == "patternProperties":
        wrong, right = {wrong: {}}, {right: {}}
    assert "ends with a single backslash" in refused({"items": {place: wrong}})
    assert check_schema(json.dumps({place: right}), "json")


def test_a_lone_surrogate_is_called_so() -> None:
    for schema in ({"const": "\ud800"}, {"pattern": "^\udc00"}, {"items": {"\ud800": 1}}):
        assert "has a lone surrogate" in refused(schema)


def test_no_advice_is_about_options_that_clients_do_not_have() -> None:
    error = refusal(json={"oneOf": [{"type": "integer"}, {"type": "number"}]})
    assert "say anyOf instead" in str(error)
    assert "option" not in str(error)


def test_names_of_properties_are_no_keywords() -> None:
    schema = {"properties": {"not": {"type": "null"}}, "required": ["not"]}
    assert takes_value({"type": "object", **schema}, {"not": None})


def test_comments_and_what_asks_for_nothing_are_taken() -> None:
    schema = {
        "title": "T",
        "description": "d",
        "default": 3,
        "examples": [{"not": 1}],
        "x-ours": {"if": 1},
        "discriminator": {"propertyName": "k"},
        "type": "array",
        "uniqueItems": False,
    }
    assert "uniqueItems" not in json.loads(check_schema(json.dumps(schema), "json"))
    assert takes_value(schema, [1])


@pytest.mark.parametrize("text", ["{", "[1]", "3", '{"items": 3}', '{"a":' * 5000])
def test_what_is_no_schema_is_refused(text: str) -> None:
    assert refused(text)


def test_a_reference_to_a_position_of_many_digits_is_refused() -> None:
    schema = {"anyOf": [{"$ref": f"#/anyOf/{'9' * 5000}"}]}
    assert "does not exist" in refused(schema)


def test_a_schema_that_is_too_deep_is_refused() -> None:
    schema: Any = {"type": "string"}
    for _ in range(200):
        schema = {"type": "array", "items": schema}
    assert "nested deeper than 100 levels" in refused(schema)


# What the public test suite of JSON schemas has groups for: a value that is as the schema
# says, and one that is not.
@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "integer"}, 5, 5.5),
        ({"type": ["string", "null"], "maxLength": 2}, "ab", "abc"),
        ({"enum": [1, "b", None]}, "b", 2),
        ({"const": {"a": [1, "é"]}}, {"a": [1, "é"]}, {"a": [1]}),
        ({"type": "object", "required": ["z"]}, {"z": 1}, {"a": 1}),
        ({"properties": {"a": {"type": "null"}}}, {"a": None}, {"a": 1}),
        (
            {"properties": {"a": {}}, "additionalProperties": False},
            {"a": 1},
            {"b": 1},
        ),
        ({"additionalProperties": {"type": "integer"}}, {"b": 1}, {"b": "x"}),
        ({"patternProperties": {"^f": {"type": "null"}}}, {"fo": None}, {"fo": 1}),
        ({"items": {"type": "boolean"}}, [True], [1]),
        ({"prefixItems": [{"type": "string"}], "items": False}, ["a"], ["a", 1]),
        ({"type": "array", "minItems": 2}, [1, 2], [1]),
        ({"type": "array", "maxItems": 1}, [1], [1, 2]),
        ({"type": "string", "minLength": 2}, "ab", "a"),
        ({"type": "string", "pattern": "^[ab]+$"}, "ab", "ac"),
        ({"type": "string", "pattern": "b"}, "abc", "ac"),
        ({"type": "integer", "minimum": 3}, 3, 2),
        ({"type": "integer", "maximum": 30}, 30, 31),
        ({"type": "integer", "exclusiveMinimum": 3}, 4, 3),
        ({"type": "number", "exclusiveMaximum": 10}, 9.5, 10),
        ({"type": "integer", "multipleOf": 7}, 21, 20),
        ({"type": "object", "minProperties": 1}, {"a": 1}, {}),
        ({"type": "object", "maxProperties": 1}, {"a": 1}, {"a": 1, "b": 2}),
        ({"anyOf": [{"type": "null"}, {"type": "integer"}]}, 4, "x"),
        ({"oneOf": [{"type": "null"}, {"type": "string"}]}, None, 4),
        ({"allOf": [{"type": "integer"}, {"minimum": 5}]}, 5, 4),
        ({"$defs": {"n": {"const": 1}}, "items": {"$ref": "#/$defs/n"}}, [1, 1], [2]),
        ({"definitions": {"n": {"const": 1}}, "$ref": "#/definitions/n"}, 1, 2),
        ({"type": "string", "format": "date"}, "2020-02-03", "2020-2"),
        ({"type": "string", "format": "email"}, "a@b.org", "a"),
        (
            {"type": "string", "format": "uuid"},
            "0" * 8 + "-0000-4000-8000-" + "0" * 12,
            "",
        ),
        (
            {
                "$defs": {"t": {"items": {"$ref": "#/$defs/t"}, "type": "array"}},
                "$ref": "#/$defs/t",
            },
            [[], [[]]],
            [1],
        ),
    ],
)
def test_schemas_allow_what_they_say(schema: Any, right: Any, wrong: Any) -> None:
    assert takes_value(schema, right)
    assert not takes_value(schema, wrong)


def test_the_compilers_own_refusals_name_the_field() -> None:
    assert refusal(json={"minLength": 2.5, "type": "string"}).param == (
        "structured_outputs.json"
    )


KEYWORDS = (
    *("type", "properties", "required", "additionalProperties", "items", "prefixItems"),
    *("anyOf", "oneOf", "allOf", "not", "enum", "const", "pattern", "format", "$ref"),
    *("minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum", "multipleOf"),
    *("minItems", "maxItems", "minProperties", "maxProperties", "patternProperties"),
    *("propertyNames", "$defs", "if", "then", "dependentRequired", "nullable", "title"),
)
WRONG_VALUES: tuple[Any, ...] = (
    *(5, -1, 1.5, True, None, "x", "", [], [5], [None], [[]], {}, {"a": 5}, {"(": {}}),
    *([{"type": 5}], "#", "#/properties/a", 10**30),
)


@pytest.mark.parametrize("word", KEYWORDS)
def test_values_of_a_wrong_type_raise_nothing_else(word: str) -> None:
    """Each keyword with values of each type: the schema is refused by name, or taken."""
    for value in WRONG_VALUES:
        keyword = {word: value}
        typed_schemas = [
            {**keyword, "type": kind} for kind in ("object", "string", "integer")
        ]
        choices = [
            {way: [keyword, {"type": "null"}]} for way in ("anyOf", "allOf", "oneOf")
        ]
        for schema in (keyword, *typed_schemas, *choices, {"properties": {"a": keyword}}):
            for lenient in (True, False):
                with suppress(GrammarError):
                    check_schema(json.dumps(schema), "json", lenient=lenient)

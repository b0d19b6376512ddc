"""What llguidance's matchers allow, refuse and bound."""

import contextlib
import json
import re
from typing import Any

import pytest

from minfer.effects.text.grammars import llguidance_matcher as walking
from minfer.effects.text.grammars.grammar_library import GrammarError, Matcher
from minfer.effects.text.grammars.llguidance_compiler import LlguidanceCompiler
from minfer.sampling.structured import StructuredOutputs
from tests.effects.text.grammars.bundled import (
    ENDS,
    allowed,
    compiler,
    ids,
    matcher,
    refusal,
    takes,
    tokenizer,
    vocab,
)
from tests.quick import at_most


def ends(walk: Matcher) -> tuple[bool, bool]:
    """Whether an output may be over, and whether it must be."""
    return walk.may_end, walk.must_end


def test_a_matcher_walks_forward_and_back() -> None:
    walk = matcher(regex="ab?")
    first = allowed(walk.mask())
    assert first == {*ids("a"), *ids("ab")}
    assert ends(walk) == (False, False)
    walk.advance(ids("a"))
    assert allowed(walk.mask()) == {*ENDS, *ids("b")}
    assert ends(walk) == (True, False)
    walk.advance(ids("b"))
    assert ends(walk) == (True, True)
    assert allowed(walk.mask()) == ENDS
    walk.rollback(2)
    assert allowed(walk.mask()) == first


def test_matchers_of_one_grammar_do_not_share_where_they_are() -> None:
    grammar = compiler().compile(StructuredOutputs(choice=["x", "y"]))
    first, second = grammar.matcher(), grammar.matcher()
    first.advance(ids("x"))
    assert first.must_end
    assert not second.must_end
    second.advance(ids("y"))


def test_what_is_not_allowed_stops_the_matcher_for_good() -> None:
    walk = matcher(regex="a+")
    with pytest.raises(GrammarError, match="doesn't satisfy"):
        walk.advance(ids("b"))
    with pytest.raises(GrammarError):
        walk.mask()
    assert not walk.must_end


def test_ids_that_no_token_has_are_never_allowed() -> None:
    padded = LlguidanceCompiler(tokenizer().as_json(), vocab() + 300, ENDS)
    walk = padded.compile(StructuredOutputs(regex="(.|\n)*")).matcher()
    assert max(allowed(walk.mask())) < vocab()
    assert len(allowed(walk.mask())) > vocab() - 300


@pytest.mark.long
def test_a_model_without_an_end_of_sequence_gets_what_never_comes_at_the_end() -> None:
    endless = LlguidanceCompiler(tokenizer().as_json(), vocab(), [])
    walk = endless.compile(StructuredOutputs(choice=["#"])).matcher()
    walk.advance(ids("#"))
    assert walk.must_end
    assert allowed(walk.mask()) == endless.forbidden_tokens


@pytest.mark.long
def test_what_stands_for_an_end_of_sequence_takes_no_token_if_an_id_is_free() -> None:
    last = {vocab() - 1}
    constraint = StructuredOutputs(regex="(.|\n)*")
    for free in (0, 1, 300):
        endless = LlguidanceCompiler(tokenizer().as_json(), vocab() + free, [])
        assert endless.forbidden_tokens == {vocab() if free else vocab() - 1}
        walk = endless.compile(constraint).matcher()
        may = allowed(walk.mask()) - endless.forbidden_tokens
        assert may & last == (last if free else set())
        assert max(may) < vocab()
        walk.advance(ids("a"))
        assert walk.may_end
        walk = endless.compile(StructuredOutputs(choice=["#"])).matcher()
        walk.advance(ids("#"))
        assert walk.must_end
        assert allowed(walk.mask()) == endless.forbidden_tokens


def test_a_tokenizer_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(GrammarError, match="tokenizer cannot be used"):
        LlguidanceCompiler('{"version": "1.0", "model": {}}', 5, [0])


def test_white_space_between_tokens_of_json_is_bounded() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert takes('{"a": 1}', json=schema)
    assert takes('{\n    "a": 1\n}', json=schema)
    assert takes('{"a":1}', json=schema)
    assert not takes('{  "a":1}', json=schema)
    assert not takes('{\n\n"a":1}', json=schema)
    assert not takes('{"a": 1}', json=schema, disable_any_whitespace=True)
    assert takes('{"a":1}', json=schema, disable_any_whitespace=True)


def one_of_ten(i: int) -> dict[str, object]:
    """A schema that six of, together, unfold to a million."""
    return {"anyOf": [{"required": [f"a{i}_{j}"]} for j in range(10)]}


@pytest.mark.parametrize(
    ("requested", "reason"),
    [
        ({"regex": "("}, "unclosed group"),
        ({"json": False}, "there is no text that false allows"),
        ({"json": {"const": json.loads("[" * 140 + "]" * 140)}}, "recursion"),
        ({"grammar": "\n" * 9000 + 'root ::= "a"'}, "of at most 8192 in GBNF"),
        ({"json": {"allOf": [one_of_ten(i) for i in range(6)]}}, "too large"),
        ({"regex": "(" * 2000 + ")" * 2000}, "invalid regex"),
        ({"grammar": "start: b"}, "unknown name"),
        ({"grammar": 'start: start "x"'}, "there is no text that it allows"),
        ({"json": {"type": "strin"}}, "Invalid type"),
        ({"json": {"enum": []}}, "Unsatisfiable"),
        ({"json": {"$ref": "#/$defs/n"}}, "does not exist"),
        ({"json": {"$ref": "https://example.com/s.json"}}, "not present"),
        (
            {"json": {"$defs": {"n": {"$ref": "#/$defs/n"}}, "$ref": "#/$defs/n"}},
            "has no value",
        ),
        ({"json": {"pattern": "(?<=a)b", "type": "string"}}, "look-behind"),
        ({"json": {"pattern": "(?=a)b", "type": "string"}}, "matches nothing"),
        ({"json": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}, "oneOf"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_its_field(
    requested: dict[str, object], reason: str
) -> None:
    (kind,) = requested
    error = refusal(**requested)
    assert error.param == f"structured_outputs.{kind}"
    assert str(error).startswith(f"structured_outputs.{kind}: ")
    assert reason in str(error)
    assert len(str(error)) < 400


def test_a_mask_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    walk = matcher(regex="a+")
    monkeypatch.setattr(walking, "MAX_MASK_SECONDS", 0)
    with pytest.raises(GrammarError, match="at most 0; make it simpler"):
        walk.mask()
    assert "make it simpler" in str(refusal(regex="a+"))


def _doubling() -> dict[str, object]:
    """A schema of 40 lines that unfolds to 2^20 schemas."""
    defs: dict[str, object] = {"d20": {"type": "string", "maxLength": 3}}
    for i in range(20):
        below = {"$ref": f"#/$defs/d{i + 1}"}
        defs[f"d{i}"] = {"allOf": [below, {"minLength": 1}, below]}
    return {"$defs": defs, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize(
    "requested",
    [
        {"regex": "(x+x+)+y"},
        {"regex": "(a|b)*a(a|b){40}c"},
        {"regex": r"(.*.*.*.*.*.*.*.*=.*.*.*)*Q"},
        {"json": {"type": "string", "maxLength": 10**9}},
        {"json": {"type": "array", "minItems": 10**5, "items": {"type": "null"}}},
        {"json": _doubling()},
        {"json": {"allOf": [one_of_ten(i) for i in range(6)]}},
        {"grammar": 'start: s\ns: s s s | s s | "a" | ""'},
        {"json": {"enum": [f"{i:050d}" for i in range(1000)]}},
    ],
)
def test_hostile_constraints_take_a_bounded_time(requested: dict[str, object]) -> None:
    with at_most(2.5), contextlib.suppress(GrammarError):
        walk = matcher(**requested)
        for _ in range(30):
            mask = allowed(walk.mask()) - ENDS
            if not mask:
                break
            walk.advance([min(mask)])


@pytest.mark.parametrize("schema", [True, " true ", "{}"])
def test_a_schema_may_allow_any_json(schema: bool | str) -> None:
    for text in ("[1, true]", "null", '{"a": "b"}'):
        assert takes(text, json=schema)
    assert not takes("nul", json=schema)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"pattern": "^a$", "minLength": 5}, "the pattern, the format and the length"),
        ({"pattern": "^x$", "format": "date"}, "the pattern, the format and the length"),
        ({"pattern": "(a"}, "a pattern is no regular expression: unclosed group"),
        ({"pattern": "*a"}, "a pattern is no regular expression: repetition operator"),
        ({"pattern": "[\\p{Foo}]"}, "Unicode property not found"),
        ({"pattern": "a^b"}, "'^' at its beginning"),
        ({"pattern": "a{3,1}"}, "a pattern is no regular expression: invalid repetition"),
    ],
)
def test_a_refusal_has_no_pattern_of_the_librarys(
    schema: dict[str, Any], words: str
) -> None:
    error = str(refusal(json={"type": "string", **schema}))
    assert words in error
    assert not re.search(r"\\x\{|SearchRegex|\(\?s:|\n", error)

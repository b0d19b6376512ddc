"""Each kind of constraint allows what it says."""

from typing import Any

import pytest

from minfer.effects.text.grammars.grammar_text import to_grammar_text
from minfer.sampling.structured import StructuredOutputs
from tests.effects.text.grammars.bundled import ids, matcher, refusal, takes

CALL = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TAGS: dict[str, Any] = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<function=f>", "schema": CALL, "end": "</function>"},
        {"begin": "<function=g>", "schema": {"type": "string"}, "end": "</function>"},
    ],
    "triggers": ["<function="],
}


@pytest.mark.parametrize("text", ["yes", 'a "quoted"\nline', "né/\\", "[a-z]"])
def test_a_choice_is_taken_as_it_is_written(text: str) -> None:
    choice = ["yes", 'a "quoted"\nline', "né/\\", "[a-z]", "yes"]
    assert takes(text, choice=choice)
    assert not takes(text + "!", choice=choice)
    assert not takes(text[:-1], choice=choice)


def test_a_choice_may_be_one_of_thousands() -> None:
    choice = [f"{i:x}/{i}" for i in range(4000)]
    assert takes(choice[3999], choice=choice)
    assert not takes("f/14", choice=choice)


def test_a_choice_may_begin_another_one() -> None:
    walk = matcher(choice=["ab", "a", "abc"])
    texts = []
    for token in (ids("a")[0], ids("b")[0], ids("c")[0]):
        walk.advance([token])
        texts.append((walk.may_end, walk.must_end))
    assert texts == [(True, False), (True, False), (True, True)]


@pytest.mark.parametrize(
    ("regex", "right", "wrong"),
    [
        ("a/b", "a/b", "ab"),
        ("^(a|b)$", "b", "c"),
        (r"a\\", "a\\", "a"),
        ("[^b]", "\n", "b"),
        ("(?s)a.c", "a\nc", "ac"),
        ("(ab|c){2}", "abc", "ab"),
        ("[^a&&b]", "x", "&"),
        ("[a||b]", "|", "c"),
        ("[^--^]", "x", "-"),
        (r"\d", "1", "\u0663"),
        (r"\w", "a", "\u200d"),
        (r"[\x00-\x1f]", "\x01", '"'),
    ],
)
def test_a_regular_expression_matches_the_whole_text(
    regex: str, right: str, wrong: str
) -> None:
    assert takes(right, regex=regex)
    assert not takes(wrong, regex=regex)


def test_a_regular_expression_does_not_end_within_an_escape() -> None:
    assert "single backslash" in str(refusal(regex="a\\"))


def test_what_cannot_be_enforced_in_a_regular_expression_is_refused_by_name() -> None:
    for regex, construct in ((r"a\b", r"the escape '\\b'"), ("a{2}{3}", "repetition")):
        reported = str(refusal(regex=regex))
        assert reported.startswith("structured_outputs.regex: ")
        assert construct in reported


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "(" start ")" | "x"',
        'root ::= "(" root ")" | "x"',
        'start: s\ns: /x/ | "(" s ")"',
    ],
)
def test_grammars_are_larks_or_llama_cpps(grammar: str) -> None:
    assert takes("((x))", grammar=grammar)
    assert not takes("((x)", grammar=grammar)


def test_a_grammar_that_cannot_be_translated_is_refused() -> None:
    assert "from GBNF to Lark" in str(refusal(grammar='root ::= ("x"'))


def test_any_object_is_json() -> None:
    assert takes('{"a": [1, "x", null]}', json_object=True)
    assert not takes("[1]", json_object=True)


def test_tags_begin_within_free_text_and_go_on_as_their_schemas_say() -> None:
    assert takes('hi <b> <function=f>{"a": 1}</function> and', structural_tag=TAGS)
    assert takes('<function=g>"x"</function>', structural_tag=TAGS)
    assert takes("no tag at all", structural_tag=TAGS)
    assert not takes('<function=g>{"a": 1}</function>', structural_tag=TAGS)
    assert not takes("<function=h>", structural_tag=TAGS)
    assert not matcher(structural_tag=TAGS).must_end


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"triggers": ["<tool"]}, "begins with none of the triggers"),
        ({"triggers": []}, "begins with none of the triggers"),
        ({"triggers": [""]}, "must be"),
        ({"type": "other"}, "must be"),
        ({"structures": []}, "must be"),
        ({"structures": [{"begin": "<function=f>"}]}, "must be"),
        ({"structures": 3}, "must be"),
        ({"format": {}}, "must be"),
        (
            {"structures": [{"begin": "<function=", "schema": {"not": 1}, "end": ""}]},
            "structures[0].schema: the keyword 'not'",
        ),
    ],
)
def test_what_is_no_structural_tag_is_refused(
    change: dict[str, Any], reason: str
) -> None:
    error = refusal(structural_tag={**TAGS, **change})
    assert error.param == "structured_outputs.structural_tag"
    assert reason in str(error)


@pytest.mark.parametrize(
    "text",
    [
        '%llguidance {}\nstart: "::="',
        '  start : "::="',
        'x: "::="\nstart: x',
    ],
)
def test_a_grammar_of_larks_may_speak_of_gbnf(text: str) -> None:
    assert to_grammar_text(StructuredOutputs(grammar=text)).text == text


def test_gbnf_with_a_rule_that_begins_like_start_is_translated() -> None:
    text = 'started ::= "a"\nroot ::= started'
    assert to_grammar_text(StructuredOutputs(grammar=text)).text != text

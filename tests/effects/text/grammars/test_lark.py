"""Grammars that others wrote: what would take the process with it, or is not enforced, is
refused, and all else is handed on as it is.
"""

import contextlib

import pytest

from minfer.effects.text.grammars.grammar_library import GrammarError
from minfer.effects.text.grammars.lark import (
    MAX_RULES_AND_BRACKETS,
    check_lark,
    to_compiled_lark,
)
from minfer.sampling.structured import MAX_CONSTRAINT
from tests.effects.text.grammars.bundled import ids, matcher, refusal, takes
from tests.quick import at_most


def refused(text: str) -> str:
    with pytest.raises(GrammarError) as caught:
        check_lark(text, "grammar")
    assert caught.value.param == "grammar"
    return str(caught.value)


def in_a_line(count: int, body: str = "r{}") -> str:
    """Rules of which each refers to the next one."""
    rules = [f"r{i}: {body.format(i + 1)}" for i in range(count)]
    return "\n".join(["start: r0", *rules, f'r{count}: "a"'])


@pytest.mark.parametrize(
    "grammar",
    [
        in_a_line(3000),
        in_a_line(3000, "r{}?"),
        in_a_line(3000).replace("r", "T").replace("staTt: T0", "start: T0"),
        in_a_line(500, "((((((((r{}))))))))"),
        '# "\n' + in_a_line(3000) + '\n# "',
        '// "\n' + in_a_line(3000) + '\n// "',
    ],
)
def test_rules_in_a_long_line_are_refused(grammar: str) -> None:
    assert "rules and brackets" in str(refusal(grammar=grammar))


def test_as_many_rules_as_may_be_in_a_line_can_be_compiled() -> None:
    assert takes("a", grammar=in_a_line(MAX_RULES_AND_BRACKETS - 2))
    assert takes(
        "a",
        grammar=in_a_line((MAX_RULES_AND_BRACKETS - 2) // 9, "(" * 8 + "r{}" + ")" * 8),
    )


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ("start: /b+/ /b+/", "bbb"),
        ('start: B B\nB: "b"+', "bbb"),
        ('%llguidance {"no_forcing": false}\nstart: /b+/ /b+/', "bbb"),
        ('start: ("a" | "c") /b+/ /b+/', "abb"),
        ("root ::= x x\nx ::= [b]+", "bbb"),
    ],
)
def test_a_letter_that_must_come_for_ever_blocks_no_thread(
    grammar: str, text: str
) -> None:
    walk = matcher(grammar=grammar)
    walk.advance(ids(text))
    assert walk.mask()


def test_brackets_beside_each_other_are_not_deep() -> None:
    grammar = "start: " + " ".join(['("a" | "b")'] * 2 * MAX_RULES_AND_BRACKETS)
    assert check_lark(grammar, "grammar") == grammar


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ('{"const": -9223372036854775808}', "too large"),
        ('{"not": {"const": 1}}', "'not' cannot be enforced"),
        ('{"x-guidance": {"lenient": true}, "const": 1}', "not enforced"),
        ('{"const": 1', "not valid JSON"),
        ("", "not valid JSON"),
    ],
)
def test_schemas_in_a_grammar_are_checked_as_others_are(schema: str, reason: str) -> None:
    assert reason in refused(f'start: "a" | %json {schema}')


@pytest.mark.parametrize(
    "grammar",
    [
        r'start: "%json \"" /\/%json (/ "::="',
        'start: "a" // %json (',
        'start: "a" # %json (',
        "start: /[/",
        'start: "no end \\',
    ],
)
def test_what_is_within_words_is_left_as_it_is(grammar: str) -> None:
    assert check_lark(grammar, "grammar") == grammar


def test_a_schema_keeps_its_options_and_what_is_behind_it() -> None:
    schema = '{"x-guidance": {"whitespace_flexible": false}, "type": "array"}'
    grammar = f'start: "=" %json {schema} "!"'
    assert takes("=[1]!", grammar=grammar)
    assert not takes("=[ 1]!", grammar=grammar)


def test_markers_are_referred_to_by_name() -> None:
    grammar = 'start: "<think>" | <think> "a" </think>  # <none>'
    walk = matcher(grammar=grammar)
    walk.advance([*ids("<think>"), *ids("a"), *ids("</think>")])
    assert walk.must_end
    compiled = to_compiled_lark(grammar, {"<think>": 7, "</think>": 8}, "grammar")
    assert compiled.startswith('start: "<think>" | <[7]> "a" <[8]>  # <none>\n%')
    assert "no marker '<thin>'" in str(refusal(grammar="start: <thin>"))
    assert to_compiled_lark("start: <[7]> <[^3-5]>", {}, "").startswith(
        "start: <[7]> <[^3-5]>\n"
    )


@pytest.mark.parametrize("sign", ["/", '"', "\\", "/\\", '"\\', "<", "<a", "%json"])
def test_to_read_one_takes_little_time(sign: str) -> None:
    text = sign * (MAX_CONSTRAINT // len(sign))
    with at_most(1), contextlib.suppress(GrammarError):
        check_lark(text, "grammar")

"""Grammars with rules that no text ends."""

import pytest

from minfer.effects.text.grammars.grammar_library import GrammarError
from minfer.effects.text.grammars.lark_terminals import TextGrammar


@pytest.mark.parametrize(
    "definition",
    [
        "start: start",
        'start: "a" start',
        "start: a\na: b\nb: a",
        'start: "a" (start | x)\nx: start',
        'start: "a" | "b" x\nx: [y] x+\ny: "c"',
        'start: "a" start ~ 1..3',
    ],
)
def test_a_rule_that_leads_only_to_itself_is_refused(definition: str) -> None:
    with pytest.raises(GrammarError, match="no text ends it"):
        TextGrammar("lark", definition).check()


@pytest.mark.parametrize(
    "definition",
    [
        'start: "a" start | "b"',
        'start: "a" [start]',
        'start: "a" start?',
        'start: "a" start ~ 0..3',
        'start: "(" (x | start)* ")"\nx: y\ny: "c"',
    ],
)
def test_a_rule_with_another_way_is_not(definition: str) -> None:
    TextGrammar("lark", definition).check()


def test_the_work_is_bounded() -> None:
    chain = [f"r{i}: r{i + 1}" for i in range(900, 0, -1)]
    spread = [line for pair in zip(chain[::2], chain[1::2], strict=True) for line in pair]
    wide = "start: " + " ".join(f"r{i}" for i in range(1, 900) for _ in range(10))
    lines = [wide, *spread, 'r901: "(" r901? ")"']
    TextGrammar("lark", "\n".join(lines)).check()

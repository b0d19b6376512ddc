"""Columns of several emits are one, and of those that say nothing, none."""

from minfer.analysis.drafts import StepDrafts
from minfer.effects.live.engine.output_columns import (
    concat,
    drafts_column,
    logprobs_column,
    pooled_column,
)
from minfer.records.messages import Emit
from minfer.records.token_logprobs import TokenLogprobs

A, B = ("a", 0), ("b", 0)
SCORED = (TokenLogprobs(7, -0.5, 1),)


def test_one_column_is_taken_as_it_is() -> None:
    only = (1, 2)
    assert concat([only]) is only
    assert concat([(1,), (), (2, 3)]) == (1, 2, 3)


def test_who_has_nothing_beside_its_tokens_has_an_empty_place() -> None:
    plain = Emit((A,), ((5,),))
    assert logprobs_column([plain, plain]) == ()
    assert pooled_column([plain]) == ()
    scored = Emit((B,), ((7,),), logprobs=(SCORED,))
    assert logprobs_column([plain, scored]) == ((), SCORED)
    pooled = Emit((B,), ((),), pooled=(b"x",))
    assert pooled_column([pooled, plain]) == (b"x", b"")


def test_drafts_are_a_column_too() -> None:
    assert drafts_column((), (A, B)) == ()
    drafts = (StepDrafts(3, (B, ("gone", 0)), (9, 9), (4, 4), (2, 2)),)
    assert drafts_column(drafts, (A, B)) == (0, 4)
    twice = (*drafts, StepDrafts(4, (B,), (12,), (1,), (0,)))
    assert drafts_column(twice, (B, A, B)) == (5, 0, 0), "of two steps in one turn"

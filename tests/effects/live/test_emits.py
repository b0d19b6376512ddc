"""Columns of several emits are one, and of those that say nothing, none."""

from minfer.effects.live.engine.turn_outputs import (
    column_of,
    joined,
    logprobs_of,
    pooled_of,
)
from minfer.records.messages import Emit
from minfer.records.plan import TokenLogprobs
from minfer.runs.drafts import Drafted

A, B = ("a", 0), ("b", 0)
SCORED = (TokenLogprobs(-0.5, 1),)


def test_one_column_is_taken_as_it_is() -> None:
    only = (1, 2)
    assert joined([only]) is only
    assert joined([(1,), (), (2, 3)]) == (1, 2, 3)


def test_who_has_nothing_beside_its_tokens_has_an_empty_place() -> None:
    plain = Emit((A,), ((5,),))
    assert logprobs_of([plain, plain]) == ()
    assert pooled_of([plain]) == ()
    scored = Emit((B,), ((7,),), logprobs=(SCORED,))
    assert logprobs_of([plain, scored]) == ((), SCORED)
    pooled = Emit((B,), ((),), pooled=(b"x",))
    assert pooled_of([pooled, plain]) == (b"x", b"")


def test_drafts_are_a_column_too() -> None:
    assert column_of((), (A, B)) == ()
    some = (Drafted(3, (B, ("gone", 0)), (9, 9), (4, 4), (2, 2)),)
    assert column_of(some, (A, B)) == (0, 4)
    twice = (*some, Drafted(4, (B,), (12,), (1,), (0,)))
    assert column_of(twice, (B, A, B)) == (5, 0, 0), "of two steps in one turn"

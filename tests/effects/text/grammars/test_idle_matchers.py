"""Matchers that served an output serve another."""

from typing import Any

import numpy as np
import pytest

from minfer.effects.text.grammars.grammar_library import Matcher
from minfer.effects.text.grammars.idle_matchers import (
    CHARACTERS_PER_WEIGHT,
    MAX_CONSTRAINTS,
    MAX_SERVED_TOKENS,
    MAX_TOTAL_WEIGHT,
    IdleMatchers,
)
from minfer.sampling.structured import StructuredOutputs
from tests.effects.live.matchers import Walker
from tests.effects.text.grammars.bundled import compiler

REQUESTED = StructuredOutputs(regex="any")


def made(**sizes: Any) -> Any:
    """A matcher, as far as one is needed here."""
    return Walker(**sizes)


def requested(name: str) -> StructuredOutputs:
    return StructuredOutputs(regex=name)


def test_who_takes_one_gets_it_at_its_beginning() -> None:
    idle, walker = IdleMatchers(), made()
    walker.advance([5, 6])
    idle.put(REQUESTED, walker, 2)
    assert len(idle) == 1
    reused: Any = idle.take(REQUESTED)
    assert reused is walker
    assert (reused.served, reused.taken) == (2, [])
    assert idle.take(REQUESTED) is None


def test_a_matcher_is_reused_only_for_its_constraint() -> None:
    idle = IdleMatchers()
    idle.put(REQUESTED, made(), 1)
    assert idle.take(requested("other")) is None
    assert idle.take(StructuredOutputs(choice=["any"])) is None
    assert len(idle) == 1


def test_one_that_cannot_begin_again_is_let_go_of() -> None:
    idle = IdleMatchers()
    idle.put(REQUESTED, made(broken=True), 1)
    assert not len(idle)


def test_a_matcher_is_dropped_after_many_tokens() -> None:
    idle, walker = IdleMatchers(), made()
    for tokens in (MAX_SERVED_TOKENS, 0):
        idle.put(REQUESTED, walker, tokens)
        reused: Any = idle.take(REQUESTED)
        assert reused is walker
    idle.put(REQUESTED, walker, 1)
    assert idle.take(REQUESTED) is None


def test_where_room_is_short_those_go_that_were_used_longest_ago() -> None:
    idle = IdleMatchers()
    first, second, third = map(requested, "abc")
    for constraint in (first, first, second):
        idle.put(constraint, made(), 1)
    assert idle.take(first) is not None  # one is left, and was not asked for
    for _ in range(MAX_TOTAL_WEIGHT - 1):
        idle.put(third, made(), 1)
    assert len(idle) == MAX_TOTAL_WEIGHT
    assert idle.take(second) is None
    assert idle.take(first) is not None
    idle.clear()
    assert not len(idle)
    for _ in range(MAX_TOTAL_WEIGHT):
        idle.put(third, made(), 1)
    assert len(idle) == MAX_TOTAL_WEIGHT


def test_few_constraints_have_some() -> None:
    idle = IdleMatchers()
    for i in range(MAX_CONSTRAINTS + 3):
        idle.put(requested(str(i)), made(), 1)
        idle.put(requested("0"), made(), 1)  # as often as all others together
    assert idle.take(requested("0")) is not None
    assert idle.take(requested("3")) is None
    assert idle.take(requested("4")) is not None


def test_long_constraints_take_more_of_it() -> None:
    idle = IdleMatchers()
    long = requested("a" * 2 * CHARACTERS_PER_WEIGHT)
    for _ in range(MAX_TOTAL_WEIGHT):
        idle.put(long, made(), 1)
    assert len(idle) == MAX_TOTAL_WEIGHT // 3


@pytest.mark.parametrize(
    "requested",
    [
        StructuredOutputs(regex="([a-z]{2,5}[ ,])*end"),
        StructuredOutputs(choice=["yes", "yesterday", "no"]),
        StructuredOutputs(grammar='start: "(" start? ")" | /[0-9]{1,3}/'),
        StructuredOutputs(
            json={
                "type": "array",
                "items": {"type": "string", "maxLength": 6},
                "maxItems": 4,
            }
        ),
    ],
    ids=lambda requested: requested.kind,
)
def test_it_allows_what_a_new_one_does(requested: StructuredOutputs) -> None:
    grammar = compiler().compile(requested)
    rng = np.random.default_rng(0)
    old = grammar.matcher()
    for _ in range(8):
        new = grammar.matcher()
        for _ in range(30):
            assert seen(old) == seen(new)
            if new.must_end:
                break
            bits = np.frombuffer(new.mask(), np.uint8)
            ids = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
            token = int(rng.choice(ids))
            old.advance([token])
            new.advance([token])
        old.restart()


def seen(walk: Matcher) -> tuple[object, ...]:
    """All that can be asked of a matcher where it is."""
    return walk.mask(), walk.may_end, walk.must_end

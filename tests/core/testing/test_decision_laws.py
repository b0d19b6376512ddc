"""Admissions, preemptions and launches that are wrong on purpose are named."""

import pytest
from attrs import evolve

from minfer.records.messages import (
    Admitted,
    Missed,
    Preempted,
)
from tests.core.executing import opened
from tests.core.test_engine import ask
from tests.core.testing.turns import (
    FULL,
    TIGHT,
    Bite,
    bitten,
    decoding,
    fills,
    has,
    named,
    planned,
    plans,
    reasoned,
)

BITES = (
    Bite("open", decoding, lambda t: planned(t, opens=(opened(ask("x")),))),
    Bite("open", fills, lambda t: planned(t, opens=plans(t)[-1].opens[1:])),
    Bite(
        "reason: .* not its wait",
        has(Admitted),
        lambda t: reasoned(t, Admitted, waited=0.5),
    ),
    Bite("reason: .* are known", has(Admitted), lambda t: reasoned(t, Admitted, known=3)),
    Bite(
        "reason: .* cannot be",
        has(Admitted),
        lambda t: reasoned(t, Admitted, hit=3, cached=3),
    ),
    Bite("hit share", has(Admitted), lambda t: reasoned(t, Admitted, prompt=3)),
    Bite("reason: None", has(Missed), lambda t: reasoned(t, Missed)),
    Bite("open|lifetime", has(Admitted), lambda t: reasoned(t, Admitted)),
    Bite(
        "hit share|lifetime",
        has(Admitted),
        lambda t: evolve(t.transition, reasons=t.transition.reasons * 2),
    ),
    Bite(
        "reason: .* knows",
        has(Preempted),
        lambda t: reasoned(t, Preempted, known=1),
        TIGHT,
        (FULL,),
    ),
    Bite(
        "reason: .* knows",
        has(Preempted),
        lambda t: reasoned(t, Preempted, computed=1),
        TIGHT,
        (FULL,),
    ),
    Bite(
        "reason: .* for an unknown sample",
        has(Preempted),
        lambda t: reasoned(t, Preempted, by=("no", 1)),
        TIGHT,
        (FULL,),
    ),
)


@pytest.mark.parametrize("bite", BITES, ids=named(BITES))
def test_a_wrong_turn_is_named(bite: Bite) -> None:
    bitten(bite)

"""What comes out of events is named where it is wrong on purpose."""

from copy import deepcopy

import pytest
from attrs import evolve

from minfer.records.messages import (
    Cancel,
    Discarded,
    Emit,
    Ended,
    Finished,
    Ignored,
    Pause,
    Propose,
    Submit,
)
from minfer.records.speculation import HOST, Speculation
from minfer.records.state import initial
from minfer.testing.invariants import InvariantError
from minfer.testing.ledger import Ledger
from tests.core.test_engine import CONFIG, ask
from tests.core.testing.turns import (
    CANCELLED,
    FAILED,
    FINISHED,
    STEADY,
    Bite,
    bitten,
    decoding,
    emitted,
    ended,
    first_finished,
    has,
    named,
    played,
    reasoned,
)

DRAFTING = Speculation(drafter=HOST, drafts=2, adaptive=False)
HOSTED = evolve(CONFIG, speculation=DRAFTING)
BITES = (
    Bite("emit: columns", decoding, lambda t: emitted(t, tokens=())),
    Bite("emit", decoding, lambda t: emitted(t, ids=(), tokens=())),
    Bite("emit", decoding, lambda t: emitted(t, tokens=((1, 1), (1, 1), (1, 1)))),
    Bite(
        "emit",
        decoding,
        lambda t: emitted(
            t, ids=tuple((n, 7) for n, _ in t.transition.state.running.ids)
        ),
    ),
    Bite(
        "lifetime",
        decoding,
        lambda t: emitted(t, finished=(Finished("unknown", 0, "stop", 0),)),
    ),
    Bite(
        "lifetime",
        decoding,
        lambda t: emitted(t, finished=(Finished("x", 0, "stop", 0),)),
    ),
    Bite("lifetime", ended, lambda t: emitted(t, finished=())),
    Bite("lifetime", ended, lambda t: first_finished(t, reason="stop"), script=CANCELLED),
    Bite("lifetime", ended, lambda t: first_finished(t, length=99), script=CANCELLED),
    Bite("lifetime", ended, lambda t: first_finished(t, sample=1), script=CANCELLED),
    Bite("lifetime", ended, lambda t: first_finished(t, cached=1), script=CANCELLED),
    Bite("lifetime", ended, lambda t: first_finished(t, length=3), script=FINISHED),
    Bite(
        "lifetime", ended, lambda t: first_finished(t, reason="length"), script=FINISHED
    ),
    Bite("lifetime", ended, lambda t: first_finished(t, id="x"), script=FINISHED),
    Bite(
        "lifetime: .* why",
        ended,
        lambda t: first_finished(t, error=""),
        script=((Submit(ask("big", 99)),),),
    ),
    Bite(
        "lifetime",
        has(Ignored),
        lambda t: evolve(
            t.transition,
            commands=(
                *t.transition.commands,
                Emit((), (), (Finished("x", 0, "rejected", 0, "so"),)),
            ),
        ),
        script=(STEADY, (Submit(ask("x")),)),
    ),
    Bite(
        "reason",
        has(Ignored),
        lambda t: reasoned(t, Ignored),
        script=(STEADY, (Cancel("unknown"),)),
    ),
    Bite(
        "reason: ignored",
        has(Ignored),
        lambda t: reasoned(t, Ignored),
        script=(STEADY, (Pause("x", 0),)),
    ),
    Bite(
        "reason: ignored",
        has(Ignored),
        lambda t: reasoned(t, Ignored),
        script=(STEADY, (Propose("x", 0, 10, (1,)),)),
    ),
    *(
        Bite(
            "reason: ignored",
            has(Ignored),
            lambda t: reasoned(t, Ignored),
            HOSTED,
            (STEADY, (emitted,)),
        )
        for emitted in (
            Propose("x", 0, 10, ()),
            Propose("x", 0, 10, (CONFIG.vocab_size,)),
            Propose("x", 1, 10, (1,)),
        )
    ),
    Bite("reason", has(Ended), lambda t: reasoned(t, Ended)),
    Bite(
        "reason: discarded",
        has(Discarded),
        lambda t: reasoned(t, Discarded, rows=7),
        script=FAILED,
    ),
)


@pytest.mark.parametrize("bite", BITES, ids=named(BITES))
def test_a_wrong_turn_is_named(bite: Bite) -> None:
    bitten(bite)


def test_nothing_is_reported_of_a_sample_after_its_end() -> None:
    ledger, over = Ledger(CONFIG, initial(CONFIG)), False
    for turn in played(CONFIG, (Submit(ask("a", 5, 3)), Submit(ask("b", 5, 20)))):
        if over:
            break
        ledger.take(turn.events, turn.transition)
        over = ended(turn)
    for wrong in (
        emitted(
            turn, ids=(("a", 0), *turn.transition.state.running.ids), tokens=((1,), (1,))
        ),
        emitted(turn, finished=(Finished("a", 0, "stop", 3),)),
    ):
        with pytest.raises(InvariantError, match=r"emit|lifetime"):
            deepcopy(ledger).take(turn.events, wrong)
    ledger.take(turn.events, turn.transition)


def test_an_id_may_be_used_anew_when_all_its_samples_have_ended() -> None:
    ledger = Ledger(CONFIG, initial(CONFIG))
    again = (Submit(ask("a", 5, 3)),)
    for turn in played(CONFIG, again, again, *[()] * 9, again):
        ledger.take(turn.events, turn.transition)
        assert has(Ignored)(turn) == (turn.number == 1)

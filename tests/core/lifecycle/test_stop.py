"""Cancelled and finished: many in a row are one by one, at a fraction of the cost."""

from typing import Any

import pytest
from attrs import evolve

from minfer.engine import step
from minfer.lifecycle.stop import Stop, stop_samples
from minfer.policies.builtin import Shortest
from minfer.records.config import EngineConfig
from minfer.records.messages import (
    Cancel,
    Emit,
    Ended,
    Event,
    Finish,
    Finished,
    Reason,
    Submit,
    Tick,
)
from minfer.records.state import EngineState, Transition
from minfer.testing.invariants import check
from minfer.values.checks import ParameterError
from tests.core.recorded import recorded
from tests.core.test_engine import Bench, ask


def emitted(turn: Transition) -> tuple[list[Finished], list[Reason]]:
    """Who ended, and the reasons, in order."""
    emits = [command for command in turn.commands if isinstance(command, Emit)]
    return [done for emit in emits for done in emit.finished], list(turn.reasons)


def one_by_one(
    config: EngineConfig, state: EngineState, stops: tuple[Stop, ...]
) -> tuple[EngineState, list[Finished], list[Reason]]:
    finished, reasons = list[Finished](), list[Reason]()
    for stop in stops:
        turn = stop_samples(config, state, (stop,))
        state, reported = turn.state, emitted(turn)
        finished += reported[0]
        reasons += reported[1]
    return state, finished, reasons


def everything(state: EngineState) -> Any:
    """A state, whatever buckets its line is in."""
    line = list(state.waiting)
    return line, evolve(state, waiting=evolve(state.waiting, buckets=()))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(0, 60, 3))
def test_stops_in_a_row_end_in_the_state_that_one_by_one_gives(seed: int) -> None:
    config, turns = recorded(seed, 30)
    crowded = max(turns, key=lambda turn: len(turn.before.requests)).before
    names = sorted(crowded.requests)
    stops: list[Stop] = [Finish(name, 1, 3) for name in names[::2]]
    stops += [Cancel(name) for name in (*names, "unknown", *names[:1])]
    stops += [Finish(name, 0, 1, "over") for name in names[-1:]]
    for some in (stops, stops[::-1], stops[::3]):
        state, finished, reasons = one_by_one(config, crowded, tuple(some))
        turn = stop_samples(config, crowded, some)
        assert emitted(turn) == (finished, reasons)
        assert everything(turn.state) == everything(state)
        check(config, turn.state)


def test_stops_in_a_row_are_one_emit_and_submissions_separate_them() -> None:
    bench = Bench()
    bench.turn(*(Submit(ask(name)) for name in "abc"))
    events: tuple[Event, ...] = (
        Tick(2.0),
        Cancel("a"),
        Cancel("b"),
        Submit(ask("a")),
        Cancel("a"),
    )
    turn = step(bench.config, bench.state, events)
    reported = [
        [done.id for done in c.finished] for c in turn.commands if isinstance(c, Emit)
    ]
    assert reported == [["a", "b"], ["a"]]


def test_who_got_a_better_place_when_preempted_is_found_there() -> None:
    config = evolve(Bench().config, num_blocks=8, policy=Shortest(0.3))
    bench = Bench(config)
    bench.turn(Submit(ask("a", 8, 16)), Submit(ask("bb", 8, 20)))
    for _ in range(12):
        if not bench.state.waiting:
            bench.turn()
    (seq,) = bench.state.waiting
    assert seq.id == ("bb", 0)
    live = bench.state.requests["bb"]
    assert seq.place != live.place, "less of its work is left"
    assert live.place_of(0) == seq.place
    bench.give(Cancel("bb"))
    assert not bench.state.waiting
    assert bench.ended["bb", 0].reason == "cancelled"


def test_a_sample_that_cannot_go_on_ends_with_an_error_that_says_why() -> None:
    bench = Bench()
    bench.turn(Submit(ask("a", 5)), Submit(ask("b", 5)))
    state = bench.state
    turn = stop_samples(bench.config, state, (Finish("a", 0, 0, "error", "x" * 500),))
    ((ended,), (reason,)) = emitted(turn)
    assert (ended.reason, ended.length) == ("error", 0)
    assert ended.error == "x" * 197 + "..."
    assert isinstance(reason, Ended)
    assert reason.error == ended.error
    check(bench.config, turn.state)


@pytest.mark.parametrize("values", [("error", ""), ("stop", "why"), ("cancelled", "why")])
def test_only_who_says_why_may_end_a_sample_with_an_error(
    values: tuple[str, str],
) -> None:
    with pytest.raises(ParameterError):
        Finish("a", 0, 0, *values)

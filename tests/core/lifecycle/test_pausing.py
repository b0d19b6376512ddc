"""A paused sample skips steps that yield, and no other sample waits for it."""

from typing import Any

import pytest
from attrs import evolve

from minfer.engine import step
from minfer.journal.codec import dump, load
from minfer.journal.projection import projected, state_digest
from minfer.journal.redact import redacted
from minfer.journal.redact_state import redacted_state
from minfer.lifecycle.pausing import apply_pauses, paused_rows
from minfer.lifecycle.preempt import preempt
from minfer.planning.discard import discard
from minfer.planning.schedule import isolated_generation
from minfer.records.config import EngineConfig
from minfer.records.messages import (
    Admitted,
    Cancel,
    Event,
    Execute,
    Finish,
    Ignored,
    Pause,
    Preempted,
    Submit,
    Tick,
)
from minfer.records.plan import Plan
from minfer.records.request import Request
from minfer.records.state import Transition, Turn
from minfer.simulation.cost import CostModel
from minfer.simulation.fork import Change, fork
from minfer.testing.ledger import Ledger
from tests.core.journal.reported import opened
from tests.core.test_engine import CONFIG, Bench, ask

LATE = evolve(CONFIG, depth=2, late_masks=True)
COST = CostModel(name="a test's", decode=((1, 0.01),), mixed=0.02, token=0.001)


class Judged(Bench):
    """A bench whose turns are judged and kept."""

    def __init__(self, config: EngineConfig = LATE) -> None:
        super().__init__(config)
        self.ledger = Ledger(config, self.state)
        self.turns: list[Turn] = []

    def give(self, *events: Event) -> Transition:
        before = self.state
        turn = super().give(*events)
        reported = (Tick(self.clock), *events)
        self.ledger.take(reported, turn)
        self.turns.append(Turn(len(self.turns), before, reported, turn))
        return turn


def bound(name: str, length: int = 6, max_tokens: int = 8, **more: Any) -> Request:
    return ask(name, length, max_tokens, needs_host_mask=True, **more)


def names(bench: Bench, plan: Plan) -> set[str]:
    here = dict(zip(bench.state.running.run_ids, bench.state.running.ids, strict=True))
    return {here[gen][0] for gen in plan.run_ids if gen in here}


def planned(bench: Bench, turn: Transition) -> set[str]:
    """Who is in the plans of a turn."""
    plans = [c.plan for c in turn.commands if isinstance(c, Execute)]
    return set[str]().union(*(names(bench, plan) for plan in plans))


def begun(*requests: Request, config: EngineConfig = LATE, turns: int = 4) -> Judged:
    bench = Judged(config)
    bench.turn(*map(Submit, requests))
    for _ in range(turns):
        bench.turn()
    return bench


def test_who_is_paused_sits_out_and_others_go_on() -> None:
    bench = begun(bound("a"), ask("bb", max_tokens=20))
    seat = bench.state.running.rows[0], bench.state.running.tables[0]
    bench.turn(Pause("a", 0))
    had = len(bench.out["a", 0])
    for _ in range(4):
        turn = bench.turn()
        assert planned(bench, turn) == {"bb"}
    assert had <= len(bench.out["a", 0]) <= had + 1, "what was planned goes on"
    run = bench.state.running
    assert (run.rows[0], run.tables[0]) == seat
    turn = bench.turn(Pause("a", 0, paused=False))
    assert planned(bench, turn) == {"a", "bb"}, "in the same turn"
    bench.drain()
    assert bench.out["a", 0] == bench.right(bound("a"))


def test_with_one_paused_sample_nothing_is_planned_until_it_goes_on() -> None:
    bench = begun(bound("a"))
    bench.turn(Pause("a", 0))
    for _ in range(3):
        bench.turn()
    assert not bench.state.inflight
    assert bench.state.running.ids == (("a", 0),)
    assert planned(bench, bench.turn(Pause("a", 0, False))) == {"a"}


def test_events_count_in_their_order_and_may_be_repeated() -> None:
    bench = begun(bound("a"), bound("bb"))
    on, off = Pause("a", 0), Pause("a", 0, False)
    for reported, paused in (
        ((on, off), False),
        ((off, on), True),
        ((on, on), True),
        ((off, off), False),
    ):
        bench.give(*reported)
        assert (("a", 0) in bench.state.paused) is paused
    bench.give(Submit(bound("late")), Pause("late", 0), Cancel("a"), Pause("a", 0))
    assert bench.state.paused == {("late", 0)}
    assert [one.event for one in bench.reasons_of(Ignored)] == ["pause"]


@pytest.mark.parametrize(
    ("name", "sample"), [("unknown", 0), ("free", 0), ("a", 1), ("a", -1)]
)
def test_who_waits_for_no_mask_is_not_paused(name: str, sample: int) -> None:
    bench = begun(bound("a"), ask("free"), turns=1)
    turn = bench.give(Pause(name, sample), Pause(name, sample, False))
    assert not bench.state.paused
    reported = [one for one in turn.reasons if isinstance(one, Ignored)]
    assert [one.event for one in reported] == ["pause", "pause"]
    assert repr(name) in reported[0].detail


def test_a_prompt_is_filled_up_to_the_input_that_yields() -> None:
    config = evolve(LATE, max_num_batched_tokens=4)
    bench = Judged(config)
    bench.give(Submit(bound("a", 11)), Pause("a", 0))
    for _ in range(6):
        bench.turn()
    assert bench.state.running.scheduled == (10,)
    assert [plan.num_scheduled_tokens for plan in bench.plans] == [(4,), (4,), (2,)]
    assert not any(plan.max_sampled_tokens != (0,) for plan in bench.plans)
    bench.turn(Pause("a", 0, False))
    assert bench.plans[-1].num_scheduled_tokens == (1,)
    assert bench.plans[-1].deferred == (0,)


def test_siblings_get_the_prompt_of_one_that_is_paused() -> None:
    bench = Judged()
    bench.give(Submit(bound("a", 11, n=3)), Pause("a", 0), Pause("a", 1))
    for _ in range(6):
        bench.turn()
    admitted = {one.sample: one for one in bench.reasons_of(Admitted)}
    assert len(admitted) == 3
    assert admitted[1].copied == 0, "it cannot be copied before its row is opened"
    assert admitted[2].copied == 2
    assert bench.out["a", 2]
    bench.turn(Pause("a", 0, False), Pause("a", 1, False))
    bench.drain()
    for sample in range(3):
        request = bound("a", 11, n=3)
        assert bench.out["a", sample] == bench.right(request, sample)


def test_a_paused_sample_in_the_queue_blocks_none_behind_it() -> None:
    """All of its prompt is cached but the last block: there is nothing to be filled."""
    bench = begun(bound("a", 9), turns=12)
    assert not bench.state.requests
    again = bound("b", 9, prompt=bound("a", 9).prompt)
    turn = bench.give(Submit(again), Pause("b", 0), Submit(ask("ccc")))
    assert planned(bench, turn) == {"ccc"}
    assert bench.state.running.ids == (("b", 0), ("ccc", 0))
    assert bench.state.running.scheduled[0] == 8
    bench.turn(Pause("b", 0, False))
    assert bench.plans[-1].opens[0].name == ("b", 0)
    bench.drain()
    assert bench.out["b", 0] == bench.right(again)


def test_who_gives_way_stays_paused_and_may_come_back() -> None:
    config = evolve(LATE, num_blocks=9)
    bench = begun(ask("a", 9, 20), bound("bb", 9, 20), config=config)
    bench.turn(Pause("bb", 0))
    while not bench.reasons_of(Preempted):
        bench.turn()
    assert [seq.id for seq in bench.state.waiting] == [("bb", 0)]
    while bench.state.running.ids != (("bb", 0),):
        assert bench.state.paused == {("bb", 0)}
        bench.turn()
    for _ in range(4):
        bench.turn()
    assert bench.state.running.scheduled == (
        bench.state.running.num_known_at_admission[0] - 1,
    )
    bench.turn(Pause("bb", 0, False))
    bench.drain()
    assert bench.out["bb", 0] == bench.right(bound("bb", 9, 20))


@pytest.mark.parametrize("end", [Cancel("a"), Finish("a", 0, 1)])
@pytest.mark.parametrize("waits", [True, False])
def test_ends_clear_it(end: Event, waits: bool) -> None:
    config = evolve(LATE, max_num_seqs=1)
    first = ask("bb", max_tokens=30)
    bench = begun(*((first,) if waits else ()), bound("a"), config=config, turns=2)
    bench.turn(Pause("a", 0))
    assert bench.state.paused
    bench.turn(end)
    assert not bench.state.paused
    bench.turn(Submit(bound("a")))
    assert not bench.state.paused, "its id means another one now"


def test_a_last_token_clears_it() -> None:
    bench = begun(bound("a", max_tokens=2), turns=0)
    while bench.state.running.scheduled[0] < bench.state.running.last_index[0]:
        bench.turn()
    bench.give(Pause("a", 0))
    bench.turn()
    bench.drain()
    assert not bench.state.paused


def test_a_paused_suspect_keeps_no_sample_waiting() -> None:
    bench = begun(bound("a"), config=evolve(LATE, max_failures=5), turns=2)
    reported: tuple[Event, ...] = (Pause("a", 0), Submit(ask("bb")))
    for more in ((), reported):
        bench.give(bench.oracle.fail("boom", halfway=False), *more)
    assert dict(bench.state.faults) == {("a", 0): 2}
    for _ in range(3):
        assert planned(bench, bench.turn()) == {"bb"}
    bench.turn(Pause("a", 0, paused=False))
    assert planned(bench, bench.turn()) <= {"a"}
    bench.drain()
    assert {one.reason for one in bench.ended.values()} == {"length"}


def test_a_paused_suspect_is_not_filled_either() -> None:
    config = evolve(LATE, max_failures=3)
    bench = begun(bound("a", 40), config=config, turns=0)
    (gen,), paused = bench.state.running.run_ids, frozenset({("a", 0)})
    state = evolve(bench.state, paused=paused)
    assert state.running.scheduled[0] + 1 < state.running.num_known_at_admission[0], (
        "a chunk is due"
    )
    assert list(paused_rows(config, state)) == []
    for count, rests in ((1, []), (2, [gen])):
        at_fault = evolve(state, faults=((("a", 0), count),))
        assert list(paused_rows(config, at_fault)) == rests
        assert isolated_generation(config, at_fault) is None
        assert isolated_generation(config, evolve(at_fault, paused=frozenset())) == (
            gen if rests else None
        )


@pytest.mark.parametrize("others", [True, False])
def test_a_suspect_that_comes_back_takes_its_seat_and_runs_isolated(others: bool) -> None:
    """It was preempted while paused. Beside others it is unknown whose fault the
    next failure is.
    """
    bench = begun(bound("a"), config=evolve(LATE, max_failures=5), turns=2)
    for _ in range(2):
        bench.give(bench.oracle.fail("boom", halfway=False))
    while bench.state.inflight:  # it never happened
        bench.state = discard(
            bench.config, bench.state, bench.state.inflight[0].step, ""
        ).state
    bench.oracle.plans.clear()
    state, _ = preempt(bench.config, bench.state, 0, ("bb", 0))
    bench.state = apply_pauses(state, [Pause("a", 0, paused=False)]).state
    bench.ledger = Ledger.at(bench.config, bench.state)
    turn = bench.give(*((Submit(ask("bb")),) if others else ()))
    assert ("a", 0) in bench.state.running.ids
    assert planned(bench, turn) == ({"bb"} if others else {"a"})
    assert planned(bench, bench.turn()) == {"a"}
    bench.drain()
    assert {one.reason for one in bench.ended.values()} == {"length"}


# --- what is kept of it -----------------------------------------------------------------


def paused_run() -> Judged:
    bench = begun(bound("a"), ask("bb", max_tokens=20))
    bench.turn(Pause("a", 0))
    for _ in range(3):
        bench.turn()
    bench.turn(Pause("a", 0, False))
    bench.drain()
    return bench


def test_a_journal_keeps_it_and_replays() -> None:
    bench = paused_run()
    turns = [*opened(bench.config, bench.turns).turns()]
    assert [turn.events for turn in turns] == [turn.events for turn in bench.turns]
    assert turns[-1].transition.state == bench.state


def test_a_redacted_run_decides_the_same() -> None:
    bench = paused_run()
    for turn in bench.turns:
        redacted_events = redacted(bench.config, turn.before, turn.events, b"secret")
        pauses = [event for event in turn.events if isinstance(event, Pause)]
        assert [event for event in redacted_events if isinstance(event, Pause)] == pauses
        hidden = redacted_state(bench.config, turn.before, b"secret")
        assert hidden.paused == turn.before.paused
        after = step(bench.config, hidden, redacted_events)
        assert after.state.paused == turn.transition.state.paused


def test_snapshots_and_digests_know_who_is_paused() -> None:
    bench = begun(bound("a"))
    before = bench.state
    after = apply_pauses(before, [Pause("a", 0)]).state
    assert load(dump(after)) == after
    assert load(dump(before)).paused == frozenset()
    assert state_digest(after) != state_digest(before)
    assert projected(after)["paused"] == [["a", 0]]
    assert "paused" not in projected(before)


def test_in_a_fork_masks_take_no_time() -> None:
    bench = paused_run()
    at = next(turn.number for turn in bench.turns if turn.before.paused)
    turns = [*fork(opened(bench.config, bench.turns), at, Change(), COST).turns]
    first, second, *_ = turns
    assert first.events == bench.turns[at].events
    assert second.events == (Pause("a", 0, False),)
    assert [turn.number for turn in turns] == [*range(at, at + len(turns))]
    after = turns[-1].transition.state
    assert not after.requests
    assert not after.paused


def test_what_changes_nothing_leaves_the_state_as_it_is() -> None:
    bench = begun(bound("a"))
    for late in (Pause("a", 0, False), Pause("unknown", 0)):
        assert apply_pauses(bench.state, [late]).state is bench.state


def test_beside_one_that_is_paused_who_lacks_a_block_takes_its_results_first() -> None:
    """If it gave way with steps in flight, it could do so again and again: none before
    it in rank gets on.
    """
    config = evolve(LATE, num_blocks=8, depth=3)
    bench = begun(bound("a", 9, 20), config=config, turns=2)
    bench.turn(Pause("a", 0))
    bench.turn(Submit(ask("bb", 11, 12)))
    for _ in range(40):
        for reason in bench.turn().reasons:
            if isinstance(reason, Preempted):
                assert reason.known > 11
                assert not bench.state.fences, "nothing of it was in flight"
    assert len(bench.out["bb", 0]) > 1
    bench.turn(Pause("a", 0, paused=False))
    bench.drain()

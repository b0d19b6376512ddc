"""What became of drafts is read off plans and results, for those who are still there."""

from itertools import pairwise

import pytest

from minfer.analysis.drafts import SampleDrafts, sample_drafts, tally_of
from minfer.engine import step
from minfer.records.messages import Cancel, Emit, Event, Executed, Failed, Submit
from minfer.records.plan import Plan
from minfer.records.state import Turn
from minfer.speculate.tally import NO_DRAFTS, DraftTally, of_row
from tests.circles import seeds
from tests.core.recorded import recorded
from tests.core.simulation.clocked import Run, request
from tests.core.simulation.drafted import by_device, drafting


def of(turn: Turn) -> tuple[SampleDrafts, ...]:
    return sample_drafts(turn.before, turn.events, turn.transition)


def counted(plan: Plan, done: Executed) -> DraftTally:
    """The drafts of a step of rows all of which are still there, read off its results."""
    found = NO_DRAFTS
    for one in plan.drafts:
        accepted = len(done.yields[one.index]) - 1
        found = found.plus(of_row(plan.num_scheduled_tokens[one.index] - 1, accepted))
    return found


def test_every_draft_of_a_run_is_judged_once() -> None:
    run = by_device()
    reported = [one for turn in run.turns for one in of(turn)]
    whole = NO_DRAFTS
    for turn in run.turns:
        for event in turn.events:
            if isinstance(event, Executed):
                whole = whole.plus(counted(turn.before.inflight[0], event))
    assert tally_of(reported) == whole
    assert 0 < sum(whole.accepted) < sum(whole.proposed)
    mine = [one for one in reported if one.id == "a"]
    assert mine[0].known == 5 + 1  # its prompt, and what that yielded
    for one, then in pairwise(mine):
        assert then.known == one.known + one.accepted + 1
        assert one.step < then.step


def test_who_has_left_is_in_no_count() -> None:
    run = Run(drafting())
    run.turn(Submit(request("a", 5, 24)), Submit(request("b", 3, 24)))
    run.turn()
    run.late(Cancel("a"))
    run.turn()
    assert {one.id for one in of(run.turns[-1])} == {"b"}


def test_a_step_that_failed_has_judged_nothing() -> None:
    run = Run(drafting())
    run.turn(Submit(request("a", 5, 24)))
    run.turn()
    assert run.state.inflight[0].drafts
    run.turn(fail="out of luck")
    assert of(run.turns[-1]) == ()


def test_results_of_a_step_that_is_not_in_flight_have_judged_nothing() -> None:
    run = Run(drafting())
    run.turn(Submit(request("a", 5, 24)))
    run.turn()
    (plan,) = run.state.inflight
    yields = ((7,) * plan.max_sampled_tokens[0],)
    unknown, known = Executed(plan.step + 1, yields), Executed(plan.step, yields)
    for events, steps in (((unknown,), []), ((unknown, known), [plan.step])):
        found = sample_drafts(run.state, events, step(run.config, run.state, events))
        assert [one.step for one in found] == steps


@pytest.mark.parametrize("fails", [False, True])
def test_results_of_two_steps_in_one_turn(fails: bool) -> None:
    """The second's drafts follow the first's tokens; if that failed, there are none."""
    run = Run(drafting(depth=2))
    run.turn(Submit(request("a", 5, 24)))
    run.turn()
    first, second = run.state.inflight
    size = second.max_sampled_tokens[0]
    assert first.drafts
    assert second.drafts
    events: list[Event] = [
        Executed(plan.step, ((7,) * size,)) for plan in (first, second)
    ]
    if fails:
        events[0] = Failed(first.step, "out of luck")
    known = run.state.running.known[0]
    found = sample_drafts(run.state, events, step(run.config, run.state, tuple(events)))
    reported = [(one.step, one.known) for one in found]
    both = [(first.step, known), (second.step, known + size)]
    assert reported == ([] if fails else both)


@pytest.mark.long
@seeds(12, 200)
def test_what_stood_is_what_a_sample_has_more(seeds: range) -> None:
    """In hostile worlds with all drafters: drafts that stood, and one, are new tokens."""
    met = 0
    for seed in seeds:
        for turn in recorded(seed)[1]:
            emits = [c for c in turn.transition.commands if isinstance(c, Emit)]
            ends = {(f.id, f.sample) for emit in emits for f in emit.finished}
            run = turn.before.running
            before = dict(zip(run.ids, run.known, strict=True))
            after = turn.transition.state.running
            known = dict(zip(after.ids, after.known, strict=True))
            steps = sum(isinstance(event, Executed) for event in turn.events)
            for one in of(turn):
                name = one.id, one.sample
                assert 0 <= one.accepted <= one.proposed
                if steps == 1 and name not in ends and name in known:
                    assert one.known == before[name]
                    assert known[name] == one.known + one.accepted + 1
                    met += 1
    assert met > 20

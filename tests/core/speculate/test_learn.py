"""What is remembered of drafts is a plain fold over steps, however lazily it fades."""

from collections.abc import Iterator

import pytest
from attrs import evolve

from minfer.records.acceptance import Acceptance, Learning, counted_drafts
from minfer.records.drafting import NOTHING_DRAFTED, Drafting, SampleAcceptance
from minfer.records.messages import Cancel, Discarded, Emit, Executed, Finished, Submit
from minfer.records.plan import Plan
from minfer.records.sequence import SampleId
from minfer.records.speculation import Speculation
from minfer.records.state import Turn
from minfer.speculate.learn import update_acceptance
from minfer.values.pmap import Map
from tests.circles import seeds
from tests.core.recorded import recorded
from tests.core.speculate.drafted import (
    FLAT,
    HOSTED,
    ON_DEVICE,
    Guess,
    begun,
    nothing,
    right,
    wrong,
)
from tests.core.test_engine import ask

QUICK = Learning(kept=0.9, rested=0.5, most=20.0)
LEARNS = evolve(HOSTED, learning=QUICK, adaptive=True, costs=FLAT)


def plain(speculation: Speculation, turns: list[Turn]) -> Iterator[Drafting]:
    """After each turn, what is remembered, all of which fades in each step: of all
    samples together, and of each if the number of drafts depends on it.
    """
    how = speculation.learning
    overall, each = Acceptance(), dict[SampleId, Acceptance]()
    for turn in turns:
        before, after = turn.before, turn.transition.state
        steps = [plan.step for plan in before.inflight[:1]]
        kinds = (one for one in turn.events if isinstance(one, Executed))
        done = [one for one in kinds if one.step in steps]
        if done:
            plan, run = before.inflight[0], before.running
            names = dict(zip(run.run_ids, run.ids, strict=True))
            emitted = _emitted(plan, done[0], names)
            for name in each.keys() - {who for who, *_ in emitted}:
                each[name] = each[name].updated(how, 0, 0)
            tried, hits = sum(n for _, n, _ in emitted), sum(n for *_, n in emitted)
            overall = overall.updated(how, tried, hits)
            for who, count, hit in emitted if speculation.adaptive else ():
                each[who] = each.get(who, Acceptance()).updated(how, count, hit)
        live = {*after.running.ids, *(seq.id for seq in after.waiting)}
        # A sample that ended is forgotten, also if another one got its id in this turn.
        live -= {(done.id, done.sample) for done in _ended(turn)}
        each = {name: record for name, record in each.items() if name in live}
        last = after.next_step - len(after.inflight) - 1
        records = {name: SampleAcceptance(record, last) for name, record in each.items()}
        yield Drafting(learnt=Map(records), overall=SampleAcceptance(overall, last))


def _emitted(
    plan: Plan, done: Executed, names: dict[int, SampleId]
) -> list[tuple[SampleId, int, int]]:
    """Of who is still there: how many drafts count, and were accepted."""
    return [
        (
            names[plan.run_ids[at]],
            counted_drafts(plan.num_scheduled_tokens[at] - 1, hit),
            hit,
        )
        for at, hit in (
            (one.index, len(done.yields[one.index]) - 1) for one in plan.drafts
        )
        if plan.run_ids[at] in names
    ]


def same(how: Learning, one: Drafting, plainly: Drafting) -> bool:
    """Whether both say the same of the step after the last one that is over."""
    step = plainly.overall.step + 1

    def near(a: SampleAcceptance, b: SampleAcceptance) -> bool:
        left, right_ = a.by(how, step), b.by(how, step)
        pair = (left.judged, left.accepted)
        return pair == pytest.approx((right_.judged, right_.accepted))

    return (
        set(one.learnt) == set(plainly.learnt)
        and near(one.overall, plainly.overall)
        and all(near(one.learnt[name], plainly.learnt[name]) for name in one.learnt)
    )


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("how", [HOSTED, ON_DEVICE], ids=["host", "device"])
@pytest.mark.parametrize("guess", [right, wrong])
def test_a_run_is_remembered_as_by_a_plain_fold(
    how: Speculation, guess: Guess, adaptive: bool
) -> None:
    speculation = evolve(how, learning=QUICK, adaptive=adaptive, costs=FLAT)
    wishes = [ask("a", 9, 30), ask("bb", 20, 30, n=2), ask("ccc", 3, 2)]
    bench = begun(speculation, *wishes, guess=guess, turns=4)
    bench.guess = nothing
    for _ in range(3):
        bench.turn()
    bench.guess = right
    bench.turn(Cancel("a"), Submit(ask("dddd", 5, 30)))
    bench.drain()
    folded = [*plain(speculation, bench.turns)]
    assert folded[-1].overall.record != Acceptance()
    for turn, plainly in zip(bench.turns, folded, strict=True):
        assert same(QUICK, turn.transition.state.drafting, plainly)


@pytest.mark.long
@seeds(12, 200)
def test_worlds_are_remembered_as_by_a_plain_fold(seeds: range) -> None:
    """Of a step's rows, the drafts of those count that are still there."""
    seen = 0
    for seed in seeds:
        config, turns = recorded(seed)
        if config.speculation is None:
            continue
        # After a failed step, steps count that never happened.
        until = next((at for at, turn in enumerate(turns) if _failed(turn)), len(turns))
        how = config.speculation.learning
        folded = plain(config.speculation, turns[:until])
        for turn, plainly in zip(turns[:until], folded, strict=True):
            drafting = turn.transition.state.drafting
            assert same(how, drafting, plainly), seed
            seen += drafting.overall.record.judged > 0
    assert seen


def _ended(turn: Turn) -> Iterator[Finished]:
    for command in turn.transition.commands:
        if isinstance(command, Emit):
            yield from command.finished


def _failed(turn: Turn) -> bool:
    return any(isinstance(one, Discarded) for one in turn.transition.reasons)


def test_only_drafts_that_were_judged_count() -> None:
    """Those behind one that was rejected do not."""
    bench = begun(HOSTED, ask("a", max_tokens=30))
    while not (plan := bench.state.inflight[0]).drafts:
        bench.turn()
    assert plan.num_scheduled_tokens == (5,)
    state = update_acceptance(
        LEARNS, evolve(bench.state, drafting=NOTHING_DRAFTED), plan, (2,)
    )
    record = SampleAcceptance(Acceptance(2.0, 1.0), plan.step)
    assert state.drafting == Drafting(Map(), Map({("a", 0): record}), record)
    state = update_acceptance(
        LEARNS, evolve(bench.state, drafting=NOTHING_DRAFTED), plan, (5,)
    )
    assert state.drafting.overall.record == Acceptance(4.0, 4.0)


def test_proposals_are_left_as_they_are() -> None:
    bench = begun(HOSTED, ask("a", max_tokens=30), turns=5)
    plan = next(plan for plan in bench.plans if plan.drafts)
    before = bench.state.drafting
    after = update_acceptance(LEARNS, bench.state, plan, (1,)).drafting
    assert after.proposals is before.proposals

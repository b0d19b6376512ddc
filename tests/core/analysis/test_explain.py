"""Explanations add up, whatever happens, and name the right causes."""

import math
import time
from collections.abc import Iterable
from random import Random

import hypothesis.strategies as st
import pytest
from attrs import evolve
from hypothesis import example, given

from minfer.analysis.explain import Explanation, UnknownRequestError, explain
from minfer.analysis.lives import Life
from minfer.journal.writing import encode_journal
from minfer.policies.fair_seats import FairSeats
from minfer.records.config import EngineConfig
from minfer.records.messages import Admitted, Cancel, Discarded, Emit, Preempted, Submit
from minfer.records.request import Request
from minfer.records.state import Turn
from minfer.simulation.cost import CostModel
from minfer.simulation.simulate import Arrival, Simulated, Simulation
from tests.circles import examples
from tests.core.journal.made import opened
from tests.core.recorded import recorded
from tests.core.simulation.clocked import Run, config, request

FEW = examples(5)
SEEDS = st.integers(0, 10**6)


def submitted(turns: Iterable[Turn]) -> dict[str, tuple[Turn, Request]]:
    """Of each id the first request that was served, or else the last that was
    rejected.
    """
    found: dict[str, tuple[Turn, Request]] = {}
    refused = set[str]()
    for turn in turns:
        for one in (e.request for e in turn.events if isinstance(e, Submit)):
            if one.id not in found or one.id in refused:
                found[one.id] = turn, one
                refused.discard(one.id)
                refused |= {one.id} if was_refused(turn, one) else set()
    return found


def was_refused(turn: Turn, one: Request) -> bool:
    state = turn.transition.state
    if any(seq.request is one for seq in (*state.waiting, *state.running.seqs)):
        return False
    ends = (
        done
        for c in turn.transition.commands
        if isinstance(c, Emit)
        for done in c.finished
    )
    return any(done.id == one.id and done.reason == "rejected" for done in ends)


def seconds(life: Life, *kinds: str, preempted: int | None = None) -> float:
    return math.fsum(
        spent.seconds
        for where, spent in life.parts.items()
        if where.kind in kinds and preempted in (None, where.preempted)
    )


def audit(turns: list[Turn], one: Explanation, begin: Turn) -> None:
    """What must hold of every explanation of a whole run."""
    assert len(one.lives) == max(1, one.request.n)
    for life in one.lives:
        assert life.arrived == begin.transition.state.time
        assert math.fsum(one.seconds for one in life.parts.values()) == pytest.approx(
            life.upto - life.arrived, abs=1e-9
        )
        assert sum(one.turns for one in life.parts.values()) == life.turn - begin.number
        assert all(one.turns >= 0 and one.seconds >= 0 for one in life.parts.values())
        _ends(turns, life)
        _waits(turns, life)
        voided = {
            number for number, reason in life.reasons if isinstance(reason, Discarded)
        }
        assert bool(voided) == ("failed" in {where.kind for where in life.parts})


def _ends(turns: list[Turn], life: Life) -> None:
    assert life.end is not None
    last = next(turn for turn in turns if turn.number == life.turn)
    emits = [c for c in last.transition.commands if isinstance(c, Emit)]
    assert life.end in [end for emit in emits for end in emit.finished]
    assert life.upto == last.transition.state.time


def _waits(turns: list[Turn], life: Life) -> None:
    """Time in line, from the reasons alone: from its arrival or preemption to an
    admission.
    """
    since, waited, times = life.arrived, [0.0], 0
    clock = {turn.number: turn.transition.state.time for turn in turns}
    for number, reason in life.reasons:
        if isinstance(reason, Admitted):
            waited[-1] += clock[number] - since
            since = math.nan
            if not times:
                assert waited[0] == pytest.approx(reason.waited, abs=1e-9)
        elif isinstance(reason, Preempted) and (reason.id, reason.sample) == life.id:
            since, times = clock[number], times + 1
            waited.append(0.0)
    if not math.isnan(since):
        waited[-1] += life.upto - since
    assert times == life.preempted
    for nth, wait in enumerate(waited):
        assert seconds(life, "line", preempted=nth) == pytest.approx(wait, abs=1e-9)


@pytest.mark.long
@FEW
@given(SEEDS)
@example(3981)  # a request is cancelled and its id let in again in one turn
@example(23465)  # an external store reports blocks that all other tiers have evicted
@example(23541)  # the policy delays all while blocks of the first are loaded
def test_all_parts_add_up_in_hostile_worlds(seed: int) -> None:
    config, turns = recorded(seed)
    begins = submitted(turns)
    for name in Random(seed).sample(sorted(begins), min(6, len(begins))):
        begin, requested = begins[name]
        one = explain(config, iter(turns), name)
        assert one.request is requested
        audit(turns, one, begin)
        last = max(life.turn for life in one.lives)
        assert explain(config, turns[: last + 1], name) == one  # nothing after it matters


@pytest.mark.long
@FEW
@given(SEEDS, st.floats(0, 1))
def test_a_run_may_begin_in_the_midst_of_things(seed: int, share: float) -> None:
    config, turns = recorded(seed)
    cut = int(share * (len(turns) - 1))
    rest, state = turns[cut:], turns[cut].before
    for name in state.requests:
        whole, part = explain(config, turns, name), explain(config, rest, name)
        if max(life.turn for life in whole.lives) < cut:
            continue  # the first of that name has left, and this is another one
        was_in = False
        for turn in turns[:cut]:
            was_in = was_in and name in turn.before.requests  # else another one had it
            reasons = turn.transition.reasons
            was_in |= any(isinstance(r, Admitted) and r.id == name for r in reasons)
        assert (part.prefix is None) == (was_in or whole.prefix is None)
        lives = {life.id: life for life in whole.lives}
        for life in part.lives:
            there = lives[life.id]
            assert (life.arrived, life.upto, life.turn) == (
                there.arrived,
                there.upto,
                there.turn,
            )
            assert (life.end, life.preempted) == (there.end, there.preempted)
            total = math.fsum(one.seconds for one in life.parts.values())
            assert total == pytest.approx(life.upto - life.arrived, abs=1e-9)
            assert seconds(life, "before") == pytest.approx(
                state.time - life.arrived, abs=1e-9
            )


@pytest.mark.long
@FEW
@given(SEEDS)
def test_a_run_that_ends_too_soon_is_reported_as_far_as_it_goes(seed: int) -> None:
    config, turns = recorded(seed)
    cut = turns[: len(turns) // 2]
    state = cut[-1].transition.state
    for name in list(state.requests)[:4]:
        for life in explain(config, cut, name).lives:
            total = math.fsum(one.seconds for one in life.parts.values())
            assert total == pytest.approx(life.upto - life.arrived, abs=1e-9)
            if life.end is None:
                assert life.upto == state.time


# --- simulations ------------------------------------------------------------------------

COST = CostModel(name="a test's", decode=((1, 0.01),), mixed=0.02, token=0.001)


@pytest.mark.long
@FEW
@given(SEEDS, st.integers(4, 40))
def test_all_parts_add_up_in_simulations(seed: int, pool: int) -> None:
    rng, now, come = Random(seed), 0.0, list[Arrival]()
    config = EngineConfig(
        num_blocks=pool,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=64,
    )
    for number in range(30):
        now += rng.expovariate(10)
        prompt = tuple(rng.randrange(2) for _ in range(rng.randint(1, 24)))
        request = Request(id=str(number), prompt=prompt, max_tokens=rng.randint(1, 20))
        come.append((now, evolve(request, n=rng.choice((1, 1, 3)))))
    turns = list(Simulation(config, Simulated(), COST, come).turns())
    begins = submitted(turns)
    for name, (begin, _) in begins.items():
        audit(turns, explain(config, turns, name), begin)


def test_rejections_duplicates_and_unknown_ids() -> None:
    run = Run(config(num_blocks=4))
    run.turn(Submit(request("a", 90)))
    rejected = explain(run.config, run.turns, "a")
    (life,) = rejected.lives
    assert life.end is not None
    assert "need" in life.end.error
    assert not life.parts
    assert (life.upto, rejected.prefix) == (life.arrived, None)
    run.turn(Submit(request("a", 5)))
    run.turn(Submit(request("a", 5)))  # while it is served
    run.drain()
    served = explain(run.config, run.turns, "a")
    (life,) = served.lives
    assert life.end is not None
    assert (life.end.reason, life.arrived) == ("length", 2.0)
    run.turn(Submit(request("a", 5)))
    run.drain()
    assert explain(run.config, run.turns, "a") == served
    with pytest.raises(UnknownRequestError, match="none of 1 requests is 'aa'; near: a"):
        explain(run.config, run.turns, "aa")
    with pytest.raises(
        UnknownRequestError, match="none of 0 requests is 'a'; near: none"
    ):
        explain(run.config, [], "a")


def test_a_request_of_a_journal_is_the_recorded_one() -> None:
    run = Run(config())
    run.turn(Submit(request("chat-1", 5)), Submit(request("chat-2", 5)))
    run.drain()
    journal = opened(encode_journal(run.config, run.turns))
    found = explain(run.config, journal.turns(), "chat-1")
    assert found == explain(run.config, run.turns, "chat-1")
    assert [life.id for life in found.lives] == [("chat-1", 0)]


def test_cancelled_in_the_turn_of_its_arrival() -> None:
    run = Run(config())
    run.turn(Submit(request("a", 5, n=2)), Cancel("a"))
    lives = explain(run.config, run.turns, "a").lives
    assert [life.end and life.end.reason for life in lives] == ["cancelled"] * 2
    assert not any(life.parts for life in lives)


def test_an_id_that_ends_and_is_refused_in_one_turn_has_ended() -> None:
    run = Run(config())
    run.turn(Submit(request("a", 5, tokens=9)))
    run.turn()
    run.turn(Cancel("a"), Submit(request("a", 0)))  # which cannot run
    run.turn()
    (life,) = explain(run.config, run.turns, "a").lives
    assert life.end is not None
    assert (life.end.reason, life.turn) == ("cancelled", 2)


def test_an_id_that_is_refused_and_taken_on_in_one_turn_is_that_of_the_one_taken_on() -> (
    None
):
    run = Run(config())
    run.turn(Submit(request("a", 0, n=2)), Submit(request("a", 5, tokens=2)))
    run.drain()
    (life,) = explain(run.config, run.turns, "a").lives
    assert life.end is not None
    assert life.end.reason == "length"


@pytest.mark.long
def test_a_turn_costs_microseconds() -> None:
    run = Run(config(num_blocks=4096, max_num_seqs=256, max_num_batched_tokens=512))
    run.turn(*(Submit(request(str(i), [i, i + 1], tokens=60)) for i in range(256)))
    run.drain()

    def seconds() -> float:
        begin = time.thread_time()  # whatever else the machine does
        explain(run.config, run.turns, "255")
        return (time.thread_time() - begin) / len(run.turns)

    assert min(seconds() for _ in range(5)) < 600e-6  # 40 us on an idle machine


def test_a_request_deferred_with_its_client_waits_for_its_share_and_behind_none() -> None:
    """What others who wait lack, seats, is not said to hold it up."""
    small = evolve(config(), max_num_seqs=4, policy=FairSeats(least=1, newcomers=9))
    names = ["b0", "a0", "a1", "a2", "c0", "d0"]
    wanted = [evolve(request(name, 4, 30), client=name[0]) for name in names]
    arrivals = [(0.01 * number, one) for number, one in enumerate(wanted)]
    turns = [*Simulation(small, Simulated(), COST, arrivals).turns()]
    (life,) = explain(small, turns, "a2").lives
    waited = {(where.cause, where.behind) for where in life.parts if where.kind == "line"}
    assert ("share", False) in waited
    (other,) = explain(small, turns, "d0").lives
    assert "share" not in {where.cause for where in other.parts}

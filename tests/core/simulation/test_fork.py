"""A fork is exact where it says so: unchanged, with the same costs, it is the run that
was.
"""

from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

import attrs
import pytest
from attrs import define

from minfer.analysis.drafts import sample_drafts
from minfer.blocks.keys import block_keys
from minfer.journal.decisions import facts
from minfer.journal.format import JournalError
from minfer.journal.replay import Journal
from minfer.policies.builtin import Shortest
from minfer.records.config import EngineConfig
from minfer.records.messages import (
    Cancel,
    Emit,
    Execute,
    Finish,
    Finished,
    Preempted,
    Submit,
)
from minfer.records.policy import Rank
from minfer.records.request import Request
from minfer.records.speculation import DEVICE, Speculation
from minfer.records.state import Turn
from minfer.simulation.cost import CostModel
from minfer.simulation.fork import Change, _read_facts, _SparingPolicy, fork
from minfer.simulation.simulate import Arrival, Simulated, Simulation
from tests.circles import claimed, long, seeds
from tests.core.journal.made import opened as opened_bytes
from tests.core.journal.reported import opened
from tests.core.journal.test_redact import blind
from tests.core.simulation.clocked import Run
from tests.core.simulation.clocked import config as clocked_config
from tests.core.simulation.clocked import request as requested
from tests.core.simulation.drafted import by_device, by_host

COST = CostModel(name="a test's", decode=((1, 0.01),), mixed=0.02, token=0.001)
CONFIG = EngineConfig(
    num_blocks=24,
    block_size=4,
    max_num_seqs=6,
    max_num_batched_tokens=16,
    max_model_len=64,
)


def arrivals(seed: int) -> tuple[list[Arrival], dict[tuple[str, int], int]]:
    rng, time, out, lengths = (
        Random(seed),
        0.0,
        list[Arrival](),
        dict[tuple[str, int], int](),
    )
    for number in range(40):
        time += rng.expovariate(8)
        prompt = tuple(rng.randrange(3) for _ in range(rng.randint(1, 24)))
        name, stops = str(number), frozenset(rng.choice(((), (7,))))
        n = rng.choice((1, 1, 1, 2))
        request = Request(id=name, prompt=prompt, max_tokens=20, stop_ids=stops, n=n)
        out.append((time, request))
        lengths |= {(name, sample): rng.randint(1, 30) for sample in range(n)}
        if rng.random() < 0.1:
            out.append((time, Cancel(str(rng.randint(0, number)))))
    return out, lengths


@cache
def simulated(seed: int) -> tuple[Turn, ...]:
    come, lengths = arrivals(seed)
    return tuple(Simulation(CONFIG, Simulated(lengths), COST, come).turns())


def recorded(seed: int) -> tuple[Journal, list[Turn]]:
    turns = [*simulated(seed)]
    return opened(CONFIG, turns), turns


def ends(turns: list[Turn]) -> dict[str, Finished]:
    emits = [c for turn in turns for c in turn.transition.commands if isinstance(c, Emit)]
    return {f"{end.id}.{end.sample}": end for emit in emits for end in emit.finished}


@pytest.mark.parametrize("seed", [0, *long(range(1, 6))])
def test_an_unchanged_fork_is_the_run_itself(seed: int) -> None:
    journal, turns = recorded(seed)
    for at in (0, len(turns) // 3, len(turns) - 2):
        made = fork(journal, at, Change(), COST)
        # A sample that ended while a step was in flight yields something there; none
        # looks at it.
        assert [turn.transition for turn in made.turns] == [
            turn.transition for turn in turns[at:]
        ]
        assert made.config == CONFIG
        assert not made.resumed


@pytest.mark.long
def test_a_request_that_does_not_arrive() -> None:
    journal, turns = recorded(1)
    made = list(fork(journal, 0, Change(without=("3",)), COST).turns)
    assert ends(made).keys() == ends(turns).keys() - {"3.0", "3.1"}
    late = next(t.number for t in turns for e in t.events if isinstance(e, Submit))
    with pytest.raises(JournalError, match="before the fork: fork at turn"):
        fork(journal, late + 50, Change(without=("0",)), COST)
    with pytest.raises(JournalError, match="no request 'unknown' arrives"):
        fork(journal, 0, Change(without=("unknown",)), COST)


@pytest.mark.long
@seeds(3, 8)
def test_a_preemption_that_does_not_happen(seeds: range) -> None:
    spared = 0
    for seed in seeds:
        journal, turns = recorded(seed)
        for turn in turns:
            gone = [r for r in turn.transition.reasons if isinstance(r, Preempted)]
            if not gone or len(turn.before.running) < 3:
                continue
            if (gone[0].id, gone[0].sample) not in turn.before.running.ids:
                continue  # it was let in and sent back in one turn
            made = fork(journal, turn.number, Change(spare=gone[0].id), COST)
            first = next(made.turns)
            others = [r for r in first.transition.reasons if isinstance(r, Preempted)]
            assert (gone[0].id, gone[0].sample) not in {(r.id, r.sample) for r in others}
            assert first.events == turn.events
            rest = [first, *made.turns]
            assert not rest[-1].transition.state.requests
            spared += 1
            break
    assert spared >= len(seeds) / 2


@pytest.mark.long
def test_a_preemption_in_a_turn_in_which_another_sample_ends() -> None:
    """A sample that ended is not there any more when one has to be preempted."""
    spared = 0
    for seed, blocks, rows in ((29, 20, 6), (39, 30, 8)):
        rng, time, come = Random(seed), 0.0, list[Arrival]()
        for number in range(40):
            time += rng.expovariate(30)
            prompt = tuple(rng.randrange(30) for _ in range(rng.randint(1, 6)))
            name, most = str(number), rng.randint(1, 20)
            come.append((time, Request(id=name, prompt=prompt, max_tokens=most)))
        config = EngineConfig(
            num_blocks=blocks,
            block_size=1,
            max_num_seqs=rows,
            max_num_batched_tokens=16,
            max_model_len=blocks,
        )
        lengths = {(str(number), 0): 30 for number in range(40)}
        turns = list(Simulation(config, Simulated(lengths), COST, come).turns())
        journal = opened(config, turns)
        for turn in turns:
            ids, reasons = turn.before.running.ids, turn.transition.reasons
            gone = [
                r.id
                for r in reasons
                if isinstance(r, Preempted) and (r.id, r.sample) in ids
            ]
            over = [name for name in ends([turn]) if (name.removesuffix(".0"), 0) in ids]
            if not gone or not over or ids.index((gone[0], 0)) < len(over):
                continue
            first = next(fork(journal, turn.number, Change(spare=gone[0]), COST).turns)
            others = [r.id for r in first.transition.reasons if isinstance(r, Preempted)]
            assert others
            assert gone[0] not in others
            spared += 1
    assert spared >= 2


@pytest.mark.long
def test_a_preemption_that_is_not_there() -> None:
    journal, _ = recorded(1)
    with pytest.raises(JournalError, match="is not preempted in turn 0"):
        fork(journal, 0, Change(spare="0"), COST)


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        {"policy": Shortest(0.1)},
        {"block_size": 8},
        {"num_blocks": 60},
        {"max_num_seqs": 2},
    ],
)
def test_another_configuration_serves_the_same_requests(settings: dict[str, Any]) -> None:
    journal, turns = recorded(2)
    for at in (0, len(turns) // 2):
        made = fork(journal, at, Change(settings=settings), COST)
        after = list(made.turns)
        assert made.config == attrs.evolve(CONFIG, **settings)
        assert bool(made.resumed) == (at > 0)
        due = {
            name: end
            for name, end in ends(turns[at:]).items()
            if end.reason != "cancelled"
        }
        found = ends(after)
        for name, end in due.items():
            assert found[name].reason in (end.reason, "length", "cancelled"), name
        assert not after[-1].transition.state.requests
        for since, request in made.resumed:
            assert since <= turns[at].transition.state.time
            if request.output:
                assert request.n == 1


def test_there_must_be_such_a_turn() -> None:
    journal, turns = recorded(0)
    with pytest.raises(JournalError, match=f"turns 0 to {len(turns) - 1}"):
        fork(journal, len(turns), Change(), COST)


@pytest.mark.parametrize(
    ("seed", "every"),
    [
        (0, 55),
        *long((seed, 23) for seed in range(4)),
        *claimed((seed, 11) for seed in range(4)),
    ],
)
def test_who_is_handed_over_keeps_time_order_and_output(seed: int, every: int) -> None:
    journal, turns = recorded(seed)
    for at in range(0, len(turns), every):
        came = [e.request.id for e in turns[at].events if isinstance(e, Submit)][:1]
        made = fork(journal, at, Change(settings={"num_blocks": 60}, without=came), COST)
        handed = [one.id for _, one in made.resumed]
        assert sorted(handed) == sorted(turns[at].before.requests)
        since = [when for when, _ in made.resumed]
        assert since == sorted(since)
        assert not [one for _, one in made.resumed if one.output and one.n > 1]
        first = next(made.turns)
        if made.resumed:
            assert first.transition.state.time == turns[at].transition.state.time
        assert {*came}.isdisjoint(
            e.request.id for e in first.events if isinstance(e, Submit)
        )


@pytest.mark.long
def test_blocks_of_another_size_have_other_keys() -> None:
    come = [
        (
            when,
            attrs.evolve(
                what, keys=block_keys(what.root, what.prompt, CONFIG.block_size)
            ),
        )
        for when, what in arrivals(0)[0]
        if isinstance(what, Request)
    ]
    turns = list(Simulation(CONFIG, Simulated(), COST, come).turns())
    journal = opened(CONFIG, turns)
    for at in (0, len(turns) // 2):
        made = fork(journal, at, Change(settings={"block_size": 8}), COST)
        wanted = [
            e.request for t in made.turns for e in t.events if isinstance(e, Submit)
        ]
        assert len(wanted) > 10
        assert not any(one.keys for one in wanted)


@define
class Says:
    """A policy that always chooses the same place."""

    place: int

    def victim(self, _: object, ranks: tuple[Rank, ...]) -> int:
        return min(self.place, len(ranks) - 1)


@pytest.mark.parametrize(
    ("count", "at", "says", "names"),
    [(5, 3, 2, [2, 1, 4, 3]), (3, 2, 9, [1, 2]), (3, 1, 1, [2, 1])],
)
def test_who_is_spared_gives_way_last(
    count: int, at: int, says: int, names: list[int]
) -> None:
    policy, left, gone = _SparingPolicy(Says(says), at), list(range(count)), list[int]()
    while len(left) > 1:
        gone.append(left.pop(policy.victim(None, ((),) * len(left))))
    assert gone == names


@pytest.mark.long
def test_without_token_ids_blocks_grow_by_multiples_only() -> None:
    turns = recorded(2)[1]
    journal = opened_bytes(blind(CONFIG, turns))
    list(fork(journal, 9, Change(settings={"block_size": 8}), COST).turns)
    for size in (2, 6):
        with pytest.raises(JournalError, match="of 4 tokens and multiples only"):
            fork(journal, 9, Change(settings={"block_size": size}), COST)


def test_a_length_by_a_stop_string_is_kept_for_who_comes_in_the_turn_of_the_fork() -> (
    None
):
    run = Run(CONFIG)
    run.turn(Submit(Request(id="a", prompt=(1, 2, 3), max_tokens=20)))
    for _ in range(6):
        run.turn()
    run.turn(Finish("a", 0, 4))
    run.drain()
    journal = opened(CONFIG, run.turns)
    made = fork(journal, 0, Change(settings={"num_blocks": 60}), COST)
    assert ends(list(made.turns))["a.0"].length == 4


@pytest.mark.long
def test_every_request_that_is_to_stay_away_must_arrive() -> None:
    journal, _ = recorded(1)
    with pytest.raises(JournalError, match="no request 'unknown' arrives from turn 0 on"):
        fork(journal, 0, Change(without=("3", "unknown")), COST)


# --- drafts -----------------------------------------------------------------------------

SECOND = CostModel(name="a second", decode=((1, 1.0),), mixed=1.0, token=0.0)


def ended_in(turns: list[Turn], name: str) -> int:
    return next(turn.number for turn in turns if f"{name}.0" in ends([turn]))


def spoken(turn: Turn) -> Any:
    """A turn's decisions, but for the ids of tokens."""
    facts_ = facts(turn.before, turn.transition)
    emits = [c for c in turn.transition.commands if isinstance(c, Emit)]
    sizes = [(emit.ids, [*map(len, emit.tokens)]) for emit in emits]
    return turn.number, turn.transition.state.time, facts_, sizes


@pytest.mark.long
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("make", [by_device, by_host])
def test_an_unchanged_fork_has_the_drafts_that_were(
    make: Callable[..., Run], depth: int
) -> None:
    run = make(depth=depth)
    for at in range(0, len(run.turns), 2):
        turns = [*fork(opened(run.config, run.turns), at, Change(), SECOND).turns]
        assert [*map(spoken, turns)] == [*map(spoken, run.turns[at:])]


@pytest.mark.parametrize("make", [by_device, by_host])
@pytest.mark.parametrize("drafts", [None, 1, 2, 6])
def test_another_number_of_drafts(make: Callable[..., Run], drafts: int | None) -> None:
    run = make()
    how = run.config.speculation
    assert how is not None
    how = None if drafts is None else attrs.evolve(how, drafts=drafts)
    change = Change(settings={"speculation": how})
    for at in (0, len(run.turns) // 2):
        made = fork(opened(run.config, run.turns), at, change, SECOND)
        turns = [*made.turns]
        assert not made.resumed, "the engine goes on with the state that it has"
        assert {name: (end.length, end.reason) for name, end in ends(turns).items()} == {
            name: (end.length, end.reason) for name, end in ends(run.turns[at:]).items()
        }
        for turn in turns:
            for event in turn.transition.commands:
                if isinstance(event, Execute):
                    each = (
                        event.plan.num_scheduled_tokens[d.index] - 1
                        for d in event.plan.drafts
                    )
                    assert max(each, default=0) <= (drafts or 0)
        again = fork(opened(run.config, run.turns), at, change, SECOND).turns
        assert [*map(spoken, again)] == [*map(spoken, turns)]
        if at == 0 and drafts in (None, 1):
            assert ended_in(turns, "a") > ended_in(run.turns, "a")


def test_recorded_drafts_stand_or_fall_as_they_did() -> None:
    run = by_host(wrong=3)
    how = run.config.speculation
    assert how is not None
    change = Change(settings={"speculation": attrs.evolve(how, drafts=1)})
    seen = 0
    for turn in fork(opened(run.config, run.turns), 0, change, SECOND).turns:
        for one in sample_drafts(turn.before, turn.events, turn.transition):
            assert one.id != "c", "for it nothing was proposed"
            assert one.accepted == (one.known % 3 != 0)
            seen += 1
    assert seen > 20


def test_speculation_is_turned_on() -> None:
    run = Run(clocked_config())
    run.turn(Submit(requested("a", 5, 30)))
    run.drain()
    how = Speculation(drafter=DEVICE, drafts=3, adaptive=False)
    lengths = list[int]()
    for acceptance in (0.0, None, 1.0):
        change = Change(settings={"speculation": how}, acceptance=acceptance)
        turns = [*fork(opened(run.config, run.turns), 3, change, SECOND).turns]
        assert ends(turns)["a.0"].length == 30
        lengths.append(len(turns))
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == len(run.turns) - 3
    assert lengths[2] < lengths[1] < lengths[0]


def test_who_does_not_arrive_is_not_cancelled() -> None:
    run = Run(clocked_config())
    run.turn(Submit(requested("stays", 6, 9)))
    run.turn(Submit(requested("gone", 6, 9)))
    run.turn()
    run.turn(Cancel("gone"))
    run.drain()
    journal = opened(run.config, run.turns)
    turns = [*fork(journal, 0, Change(without=("gone",)), COST).turns]
    assert not [one for turn in turns for one in turn.events if isinstance(one, Cancel)]


def test_how_long_a_sample_was_that_was_cancelled_is_not_its_length() -> None:
    run = Run(clocked_config())
    run.turn(Submit(requested("gone", 6, 9)), Submit(requested("ends", 6, 9)))
    run.turn()
    run.turn(Cancel("gone"))
    run.drain()
    journal = opened(run.config, run.turns)
    assert _read_facts(journal, 0, frozenset(), None).lengths == {("ends", 0): 9}

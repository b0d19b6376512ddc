"""A fork is exact where it says so: unchanged, with the same costs, it is the run that was."""

from random import Random
from typing import Any

import attrs
import pytest

from minfer.config import EngineConfig
from minfer.fork import Change, fork
from minfer.journal import JournalError, encode_journal
from minfer.messages import Cancel, Emit, Finished, Preempted, Submit
from minfer.policies import Shortest
from minfer.replay import Journal, open_segments
from minfer.request import Request
from minfer.simulate import Arrival, CostModel, Simulated, Simulation
from minfer.state import Turn

COST = CostModel(name="a test's", decode=((1, 0.01),), mixed=0.02, token=0.001)
CONFIG = EngineConfig(
    num_blocks=24, block_size=4, max_num_seqs=6, max_num_batched_tokens=16, max_model_len=64
)


def arrivals(seed: int) -> tuple[list[Arrival], dict[tuple[str, int], int]]:
    rng, time, out, lengths = Random(seed), 0.0, list[Arrival](), dict[tuple[str, int], int]()
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


def recorded(seed: int) -> tuple[Journal, list[Turn]]:
    come, lengths = arrivals(seed)
    turns = list(Simulation(CONFIG, Simulated(lengths), COST, come).turns())
    return Journal(open_segments({"run": encode_journal(CONFIG, turns)})), turns


def ends(turns: list[Turn]) -> dict[str, Finished]:
    emits = [c for turn in turns for c in turn.transition.commands if isinstance(c, Emit)]
    return {f"{end.id}.{end.sample}": end for emit in emits for end in emit.finished}


@pytest.mark.parametrize("seed", range(6))
def test_an_unchanged_fork_is_the_run_itself(seed: int) -> None:
    journal, turns = recorded(seed)
    for at in (0, len(turns) // 3, len(turns) - 2):
        made = fork(journal, at, Change(), COST)
        # Whoever ended while a step was in flight yields something there; nobody looks at it.
        assert [turn.transition for turn in made.turns] == [turn.transition for turn in turns[at:]]
        assert made.config == CONFIG
        assert not made.handed


def test_a_request_that_does_not_arrive() -> None:
    journal, turns = recorded(1)
    made = list(fork(journal, 0, Change(without=("3",)), COST).turns)
    assert ends(made).keys() == ends(turns).keys() - {"3.0", "3.1"}
    late = next(t.number for t in turns for e in t.events if isinstance(e, Submit))
    with pytest.raises(JournalError, match="before the fork: fork at turn"):
        fork(journal, late + 50, Change(without=("0",)), COST)
    with pytest.raises(JournalError, match="no request 'nobody' arrives"):
        fork(journal, 0, Change(without=("nobody",)), COST)


def test_a_preemption_that_does_not_happen() -> None:
    spared = 0
    for seed in range(8):
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
    assert spared >= 4


def test_a_preemption_in_a_turn_in_which_somebody_else_ends() -> None:
    """Whoever ended is not there any more when somebody has to give way."""
    spared = 0
    for seed, blocks, rows in ((29, 20, 6), (39, 30, 8)):
        rng, time, come = Random(seed), 0.0, list[Arrival]()
        for number in range(40):
            time += rng.expovariate(30)
            prompt = tuple(rng.randrange(30) for _ in range(rng.randint(1, 6)))
            name, most = str(number), rng.randint(1, 20)
            come.append((time, Request(id=name, prompt=prompt, max_tokens=most)))
        config = EngineConfig(num_blocks=blocks, block_size=1, max_num_seqs=rows,
                              max_num_batched_tokens=16, max_model_len=blocks)  # fmt: skip
        lengths = {(str(number), 0): 30 for number in range(40)}
        turns = list(Simulation(config, Simulated(lengths), COST, come).turns())
        journal = Journal(open_segments({"run": encode_journal(config, turns)}))
        for turn in turns:
            ids, reasons = turn.before.running.ids, turn.transition.reasons
            gone = [r.id for r in reasons if isinstance(r, Preempted) and (r.id, r.sample) in ids]
            over = [name for name in ends([turn]) if (name.removesuffix(".0"), 0) in ids]
            if not gone or not over or ids.index((gone[0], 0)) < len(over):
                continue
            first = next(fork(journal, turn.number, Change(spare=gone[0]), COST).turns)
            others = [r.id for r in first.transition.reasons if isinstance(r, Preempted)]
            assert others
            assert gone[0] not in others
            spared += 1
    assert spared >= 2


def test_a_preemption_that_is_not_there() -> None:
    journal, _ = recorded(1)
    with pytest.raises(JournalError, match="is not preempted in turn 0"):
        fork(journal, 0, Change(spare="0"), COST)


@pytest.mark.parametrize(
    "settings",
    [{"policy": Shortest(0.1)}, {"block_size": 8}, {"num_blocks": 60}, {"max_num_seqs": 2}],
)
def test_another_configuration_serves_the_same_requests(settings: dict[str, Any]) -> None:
    journal, turns = recorded(2)
    for at in (0, len(turns) // 2):
        made = fork(journal, at, Change(settings=settings), COST)
        after = list(made.turns)
        assert made.config == attrs.evolve(CONFIG, **settings)
        assert bool(made.handed) == (at > 0)
        due = {name: end for name, end in ends(turns[at:]).items() if end.reason != "cancelled"}
        found = ends(after)
        for name, end in due.items():
            assert found[name].reason in (end.reason, "length", "cancelled"), name
        assert not after[-1].transition.state.requests
        for since, request in made.handed:
            assert since <= turns[at].transition.state.time
            if request.output:
                assert request.n == 1


def test_there_must_be_such_a_turn() -> None:
    journal, turns = recorded(3)
    with pytest.raises(JournalError, match=f"turns 0 to {len(turns) - 1}"):
        fork(journal, len(turns), Change(), COST)

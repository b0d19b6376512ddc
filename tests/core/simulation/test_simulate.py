"""The engine on a virtual clock: when turns are taken, what steps cost, who
ends where.
"""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from attrs import evolve

from minfer.analysis.drafts import sample_drafts
from minfer.policies.builtin import Priority, Shortest
from minfer.records.config import EngineConfig
from minfer.records.messages import (
    Admitted,
    Cancel,
    Emit,
    Execute,
    Executed,
    Failed,
    Finished,
    Move,
    Moved,
    Preempted,
    Submit,
    Tick,
    TransferCommand,
)
from minfer.records.plan import Plan
from minfer.records.policy import FirstCome, Load, Policy
from minfer.records.request import Request
from minfer.records.sequence import SampleId
from minfer.records.speculation import DEVICE, DRAFTERS, MOST_DRAFTS, Speculation
from minfer.records.state import EngineState, Turn
from minfer.records.tiers import LOAD, ExternalStore, HostTier
from minfer.simulation.cost import CostModel, StepWork, work_of
from minfer.simulation.guesses import Guesses
from minfer.simulation.oracle import Oracle
from minfer.simulation.simulate import IDLE, Arrival, ArrivalQueue, Simulated, Simulation
from minfer.testing.invariants import check
from minfer.testing.ledger import check_turn
from tests.circles import claimed
from tests.core.world import some_speculation, tiny_config

EVEN = CostModel(name="a second", decode=((1, 1.0),), mixed=1.0, token=0.0)


def config_of(**how: int) -> EngineConfig:
    return EngineConfig(
        **{
            "num_blocks": 64,
            "block_size": 4,
            "max_model_len": 64,
            "max_num_seqs": 4,
            **how,
        }  # type: ignore[arg-type]  # sizes are int
    )


def requested(name: str, prompt: int = 4, most: int = 3, **more: object) -> Request:
    fields: Any = {"root": name.encode(), **more}
    return Request(id=name, prompt=(7,) * prompt, max_tokens=most, **fields)


def ends(turns: list[Turn]) -> dict[SampleId, Finished]:
    emits = (c for turn in turns for c in turn.transition.commands if isinstance(c, Emit))
    return {(done.id, done.sample): done for emit in emits for done in emit.finished}


def plans(turns: list[Turn]) -> list[Plan]:
    return [
        c.plan for t in turns for c in t.transition.commands if isinstance(c, Execute)
    ]


def ticks(turns: list[Turn]) -> list[float]:
    return [turn.transition.state.time for turn in turns]


# --- time -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overlaps", "host", "expected"),
    [
        (True, 0.0, [0, 1, 2, 3, 4]),
        (True, 0.25, [0, 1.25, 2.25, 3.25, 4.25]),  # the host works while the device does
        (
            True,
            1.5,
            [0, 2.5, 4, 5.5, 7],
        ),  # the device waits for the host, two steps ahead
        (False, 0.25, [0, 1.25, 2.5, 3.75, 5]),  # they take turns
    ],
)
def test_a_step_starts_when_it_is_launched_or_the_one_before_has_ended(
    overlaps: bool, host: float, expected: list[float]
) -> None:
    cost = evolve(EVEN, host=host, overlaps=overlaps)
    simulation = Simulation(
        config_of(), Simulated(), cost, [(0.0, requested("a", most=3))]
    )
    found = ticks([*simulation.turns()])
    assert found == expected[: len(found)]
    assert len(found) >= 4


@pytest.mark.parametrize(
    ("eager", "expected"),
    [(0.5, [0, 1, 2, 4.5, 4.5, 5.5]), (4.0, [0, 1, 2, 4.5, 7, 8])],
)
def test_while_a_launch_takes_the_host_it_learns_of_no_end(
    eager: float, expected: list[float]
) -> None:
    """The step in flight ended at 3; the one launched from 2 on began then."""
    cost = evolve(EVEN, launch=2.5, captured=4, eager=eager)
    come: list[Arrival] = [
        (0.0, requested("a", most=9)),
        (1.5, requested("b", prompt=5, most=9)),
    ]
    turns = [*Simulation(config_of(), Simulated(), cost, come).turns()]
    assert ticks(turns)[:6] == expected
    small, big = plans(turns)[0], plans(turns)[3]
    assert [cost.launch_seconds(plan) for plan in (small, big)] == [0.0, 2.5]
    assert (cost.seconds(small), cost.seconds(big)) == (1.0, eager)


def test_one_step_in_flight_waits_for_its_results() -> None:
    cost = evolve(EVEN, host=0.25)
    simulation = Simulation(
        config_of(depth=1), Simulated(), cost, [(0.0, requested("a", most=2))]
    )
    assert ticks([*simulation.turns()]) == [0, 1.25, 2.5]


def test_requests_that_come_while_a_step_runs_enter_the_next_turn() -> None:
    arrivals: list[Arrival] = [
        (0.5, requested("a", most=2)),
        (0.7, requested("b", most=2)),
        (50.0, requested("c", most=1)),
    ]
    turns = [*Simulation(config_of(), Simulated(), EVEN, arrivals).turns()]
    came = {
        event.request.id: turn.transition.state.time
        for turn in turns
        for event in turn.events
        if isinstance(event, Submit)
    }
    assert came == {"a": 0.5, "b": 1.5, "c": 50.0}
    assert [turn.number for turn in turns] == list(range(len(turns)))


class Late(FirstCome):
    """Admits no request before two seconds have passed since the first in line came."""

    def admit_from(self, _: object, load: Load) -> float:
        return load.arrived + 2.0


def test_a_time_that_the_policy_asks_for_is_kept() -> None:
    config = evolve(config_of(), policy=Late())
    arrivals: list[Arrival] = [(1.0, requested("a")), (1.5, requested("b"))]
    turns = [*Simulation(config, Simulated(), EVEN, arrivals).turns()]
    admitted = {
        r.id: t.transition.state.time
        for t in turns
        for r in t.transition.reasons
        if isinstance(r, Admitted)
    }
    assert admitted == {"a": 3.0, "b": 4.0}  # b at 3.5, but there a step runs


class Never(FirstCome):
    """Always puts everybody off for half a second more."""

    def admit_from(self, _: object, load: Load) -> float:
        return load.time + 0.5


@pytest.mark.long
def test_a_policy_that_admits_no_request_ends_the_simulation() -> None:
    config = evolve(config_of(), policy=Never())
    turns = [
        *Simulation(
            config, Simulated(), EVEN, [(0.0, requested("a")), (9.0, requested("b"))]
        ).turns()
    ]
    assert not ends(turns)
    assert IDLE < len(turns) < IDLE + 30


def test_it_starts_at_a_time_and_a_number_and_can_go_on_with_what_waits() -> None:
    first = Simulation(
        config_of(), Simulated(), EVEN, [(0.0, requested("a", most=20))]
    ).turns()
    state = next(first).transition.state
    later = Simulation(
        config_of(), Simulated(state=state), EVEN, (), state, time=9.0, number=5
    )
    turns = [*later.turns()]
    assert turns[0].number == 5
    assert turns[0].transition.state.time == 10.0
    assert ends(turns)["a", 0].length == 20


def test_it_can_take_over_when_nothing_is_in_flight() -> None:
    config = evolve(config_of(), policy=Late())
    held = next(Simulation(config, Simulated(), EVEN, [(1.0, requested("a"))]).turns())
    state = held.transition.state
    assert len(state.waiting) == 1
    assert not state.inflight
    turns = [*Simulation(config, Simulated(), EVEN, (), state, time=1.0).turns()]
    assert ends(turns)["a", 0].length == 3
    assert ticks(turns)[:2] == [1.0, 3.0]


def test_arrivals_may_be_added_while_turns_are_read() -> None:
    coming, seen = ArrivalQueue([(0.0, requested("0"))]), set[str]()
    for turn in Simulation(config_of(), Simulated(), EVEN, coming).turns():
        for name, _ in ends([turn]):
            seen.add(name)
            if len(seen) < 5:
                coming.append((0.0, requested(str(len(seen)))))
    assert seen == {"0", "1", "2", "3", "4"}


def by_hand(plan: Plan) -> StepWork:
    """A plan, input by input."""
    inputs = solo = chunks = read = pairs = depth = 0
    drafting = {draft.index: draft for draft in plan.drafts}
    filled = {fill.index for fill in plan.fills}
    for i, (start, count) in enumerate(
        zip(plan.starts, plan.num_scheduled_tokens, strict=True)
    ):
        if i in filled:
            inputs += count
            chunks += 1
            pairs += sum(position + 1 for position in range(start, start + count))
            read += start + count
        else:
            verified = count if i in drafting else 1
            solo += verified
            read += start + verified
        if i in drafting and not drafting[i].tokens:
            depth = max(depth, count - 1)
    return StepWork(inputs, solo, chunks, read, pairs, depth)


# --- drafts -----------------------------------------------------------------------------


def with_drafts(drafter: str, drafts: int = 3, **how: int) -> EngineConfig:
    speculation = Speculation(drafter=drafter, drafts=drafts, adaptive=False)
    return evolve(config_of(**how), speculation=speculation)


def stood(turns: list[Turn], name: str) -> dict[int, bool]:
    """By position, whether a draft for it stood, where that was seen."""
    found = dict[int, bool]()
    for turn in turns:
        for one in sample_drafts(turn.before, turn.events, turn.transition):
            if one.id == name:
                found |= {one.known + k: True for k in range(one.accepted)}
                if one.accepted < one.proposed:
                    found[one.known + one.accepted] = False
    return found


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_what_stands_is_a_fact_of_sample_and_position(drafter: str, depth: int) -> None:
    """Whatever the number of drafts, who else runs, and how far steps are ahead."""
    come: list[Arrival] = [(0.0, requested("a", most=50)), (3.0, requested("b", most=20))]
    guesses = Guesses(0.7)

    def run(config: EngineConfig, come: list[Arrival]) -> list[Turn]:
        executor = Simulated(guesses=guesses)
        simulation = Simulation(config, executor, EVEN, come, guesses=guesses)
        return [*simulation.turns()]

    solo = stood(run(with_drafts(DEVICE, 1, depth=1), come[:1]), "a")
    turns = run(with_drafts(drafter, 3, depth=depth), come)
    found = stood(turns, "a")
    both = solo.keys() & found.keys()
    assert len(both) > 15
    assert [solo[at] for at in sorted(both)] == [found[at] for at in sorted(both)]
    assert {done.length for done in ends(turns).values()} == {50, 20}
    for turn in turns:
        check(with_drafts(drafter, 3, depth=depth), turn.transition.state)


@pytest.mark.parametrize(("rate", "steps"), [(1.0, 4), (0.0, 13)])
def test_drafts_that_stand_save_steps(rate: float, steps: int) -> None:
    """Of 13 tokens the first comes with the prompt; then four a step, or one."""
    executor = Simulated(guesses=Guesses(rate))
    come: list[Arrival] = [(0.0, requested("a", most=13))]
    config = with_drafts(DEVICE, depth=1)
    turns = [*Simulation(config, executor, EVEN, come).turns()]
    assert len(plans(turns)) == steps
    assert ends(turns)["a", 0].length == 13


def test_a_step_yields_as_many_tokens_as_may_be_drafted_and_one() -> None:
    for drafts in (MOST_DRAFTS - 1, MOST_DRAFTS):
        executor = Simulated(guesses=Guesses(1.0))
        come: list[Arrival] = [(0.0, requested("a", most=1 + 2 * (drafts + 1)))]
        config = with_drafts(DEVICE, drafts, depth=1, max_model_len=256, num_blocks=99)
        turns = [*Simulation(config, executor, EVEN, come).turns()]
        assert [plan.max_sampled_tokens for plan in plans(turns)] == [
            (1,),
            *[(drafts + 1,)] * 2,
        ]


def test_an_end_within_drafts_that_stand_is_where_it_is_planned() -> None:
    request = requested("a", most=40, stop_ids=frozenset({0}))
    for length in range(1, 12):
        executor = Simulated({("a", 0): length}, guesses=Guesses(1.0))
        simulation = Simulation(with_drafts(DEVICE), executor, EVEN, [(0.0, request)])
        done = ends([*simulation.turns()])["a", 0]
        assert (done.length, done.reason) == (length, "stop")


# --- random worlds ----------------------------------------------------------------------


def random_arrivals(rng: Random) -> tuple[list[Arrival], dict[SampleId, int]]:
    arrivals, lengths, time = list[Arrival](), dict[SampleId, int](), 0.0
    for number in range(rng.randint(1, 12)):
        time += rng.choice((0.0, 0.5, 3.0))
        request = Request(
            id=str(number),
            prompt=tuple(rng.choices(range(5), k=rng.randint(1, 12))),
            max_tokens=rng.randint(1, 12),
            n=rng.choice((1, 1, 3)),
            stop_ids=frozenset(rng.sample(range(6), k=rng.randint(0, 4))),
        )
        arrivals.append((time, request))
        for sample in range(request.n):
            if rng.random() < 0.7:
                lengths[request.id, sample] = rng.randint(1, 14)
        if rng.random() < 0.2:
            arrivals.append((time + rng.choice((0.0, 1.0)), Cancel(str(number))))
            time = arrivals[-1][0]
    return arrivals, lengths


def speculating(config: EngineConfig, seed: int) -> EngineConfig:
    return evolve(config, speculation=some_speculation(Random(f"speculation {seed}")))


def planned(config: EngineConfig, one: Request, length: int | None) -> tuple[int, str]:
    """How a sample ends that is not cancelled: its length, and why."""
    room = min(one.max_tokens, config.max_model_len - len(one.prompt))
    if length is None or not one.stop_ids or length >= room:
        return room, "length"
    return length, "stop"


@pytest.mark.parametrize("seed", [*range(15), *claimed(range(15, 60))])
def test_every_sample_ends_where_it_is_planned(seed: int) -> None:
    rng = Random(seed)
    config = speculating(tiny_config(rng), seed)
    arrivals, lengths = random_arrivals(rng)
    turns = [*Simulation(config, Simulated(lengths), EVEN, arrivals).turns()]
    found, every = ends(turns), {w.id: w for _, w in arrivals if isinstance(w, Request)}
    gone = {what.id for _, what in arrivals if isinstance(what, Cancel)}
    assert {name for name, _ in found} == set(every)
    for (name, sample), done in found.items():
        if done.reason != "rejected" and name not in gone:
            assert (done.length, done.reason) == planned(
                config, every[name], lengths.get((name, sample))
            )
    for turn in turns:
        check(config, turn.transition.state)
        check_turn(config, turn.before, turn.events, turn.transition)
    for plan in plans(turns):
        assert work_of(plan) == by_hand(plan)
    assert ticks(turns) == sorted(ticks(turns))


def decided(turn: Turn) -> object:
    return turn.number, turn.before, turn.transition


@pytest.mark.parametrize("seed", [*range(6), *claimed(range(6, 30))])
def test_it_takes_over_in_the_middle_of_a_run(seed: int) -> None:
    """Whatever turn it takes over at, every sample ends as it would have."""
    rng = Random(seed)
    config = speculating(tiny_config(rng), seed)
    arrivals, lengths = random_arrivals(rng)
    together = [(0.0, what) for _, what in arrivals if isinstance(what, Request)]
    turns = [*Simulation(config, Simulated(lengths), EVEN, together).turns()]
    for at in rng.sample(range(len(turns)), k=min(4, len(turns))):
        state = turns[at].transition.state
        rest = Simulation(
            config,
            Simulated(lengths, state),
            EVEN,
            (),
            state,
            time=state.time,
            number=at + 1,
        )
        # Of rows whose sample has ended it does not know what they would have yielded.
        assert [decided(turn) for turn in rest.turns()] == [
            *map(decided, turns[at + 1 :])
        ]


def test_failed_steps_take_their_successors_along() -> None:
    class Frail(Simulated):
        calls = 0

        def collect(self) -> Executed | Failed:
            self.calls += 1
            return (
                self.fail("boom", halfway=False)
                if self.calls % 3 == 0
                else super().collect()
            )

    config, arrivals = (
        config_of(max_failures=9),
        [(0.0, requested(n, most=6)) for n in "abcde"],
    )
    turns = [*Simulation(config, Frail(), EVEN, arrivals).turns()]
    assert {done.length for done in ends(turns).values()} == {6}
    assert any(isinstance(event, Failed) for turn in turns for event in turn.events)
    # Each turn that has results is a second after the one before: no discarded step takes
    # time.
    gaps = [
        turn.transition.state.time - turn.before.time
        for turn in turns
        if any(isinstance(e, Executed | Failed) for e in turn.events)
    ]
    assert gaps == [1.0] * len(gaps)


@pytest.mark.parametrize("make", [Simulated, lambda: Oracle(4, 100)])
def test_any_executor_will_do(make: Callable[[], Oracle]) -> None:
    turns = [
        *Simulation(
            config_of(), make(), EVEN, [(0.0, requested(n)) for n in "abc"]
        ).turns()
    ]
    assert {done.length for done in ends(turns).values()} == {3}
    assert isinstance(turns[0].events[0], Tick)


def test_a_sample_with_every_small_token_as_a_stop_id_still_goes_on() -> None:
    request = requested("a", most=8, stop_ids=frozenset(range(5)))
    for length, expected in ((3, (3, "stop")), (None, (8, "length")), (0, (1, "stop"))):
        lengths = {} if length is None else {("a", 0): length}
        turns = [
            *Simulation(config_of(), Simulated(lengths), EVEN, [(0.0, request)]).turns()
        ]
        done = ends(turns)["a", 0]
        assert (done.length, done.reason) == expected


@pytest.mark.parametrize("requests", [100, *claimed([300])])
@pytest.mark.parametrize("policy", [FirstCome(), Priority(), Shortest(0.1)], ids=repr)
def test_no_sample_is_admitted_to_be_preempted_at_once(
    policy: Policy, requests: int
) -> None:
    """Where blocks are few, a request that fills its last block would come and go every
    two turns, and not write a token meanwhile.
    """
    rng, time, arrivals = Random(3), 0.0, list[Arrival]()
    for number in range(requests):
        time += rng.expovariate(0.1)
        prompt, most = (1,) * rng.randrange(10, 120), rng.randrange(5, 80)
        urgent = -(number % 9 == 0)
        one = Request(id=str(number), prompt=prompt, max_tokens=most, priority=urgent)
        arrivals.append((time, evolve(one, root=str(number).encode())))
    config = EngineConfig(
        num_blocks=14,
        block_size=16,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        policy=policy,
    )
    lost, again, last = 0, 0, dict[str, int]()
    for turn in Simulation(config, Simulated(), EVEN, arrivals).turns():
        for reason in turn.transition.reasons:
            if isinstance(reason, Preempted):
                lost, again = (
                    lost + 1,
                    again + (turn.number - last.get(reason.id, -9) <= 4),
                )
                last[reason.id] = turn.number
    assert lost > requests / 6
    assert again <= 1


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("executor", [Simulated, lambda: Oracle(4, 40)])
def test_transfers_take_their_time_one_after_the_other(
    executor: Callable[[], Oracle],
    external: bool,
) -> None:
    """Of 4 blocks: a fixed second, and one for each."""
    costs: dict[str, Any] = {
        "choice": LOAD,
        "load_seconds": 1.0,
        "page_seconds": 1.0,
    }
    config = config_of(num_blocks=8)
    if external:
        config = evolve(config, external_store=ExternalStore(max_known_keys=99, **costs))
    else:
        config = evolve(config, host=HostTier(pages=64, **costs))
    first = requested("a", 17)
    others = [(50.0 + i, requested(f"other{i}", 25)) for i in range(2)]
    again = evolve(first, id="again")
    arrivals: list[Arrival] = [(0.0, first), *others, (200.0, again)]
    turns = list(Simulation(config, executor(), EVEN, arrivals).turns())
    ended = {
        event.number: event_turn.transition.state.time
        for event_turn in turns
        for event in event_turn.events
        if isinstance(event, Moved)
    }
    moves = {
        command.number: (command, turn.transition.state.time)
        for turn in turns
        for command in turn.transition.commands
        if isinstance(command, TransferCommand)
    }
    assert ended.keys() == moves.keys()
    [load] = [number for number, (move, _) in moves.items() if _loads(move)]
    assert ended[load] - moves[load][1] == pytest.approx(5, abs=0.1)
    first_store, began = moves[0]
    stored = first_store.sources if isinstance(first_store, Move) else first_store.keys
    assert ended[0] - began >= 1 + len(stored)
    for number, pages in ((load, 4), (0, len(stored))):
        state = _with_transfer(turns, number)
        resumed = Simulation(
            config, Simulated(state=state), EVEN, [], state=state, time=300.0
        )
        rest = [*resumed.turns()]
        assert not rest[-1].transition.state.requests
        assert _end_of(rest, number) >= 301 + pages


def _loads(command: TransferCommand) -> bool:
    return command.kind.to_device


def _end_of(turns: list[Turn], transfer: int) -> float:
    """When a transfer ended."""
    return next(
        turn.transition.state.time
        for turn in turns
        for event in turn.events
        if isinstance(event, Moved) and event.number == transfer
    )


def _with_transfer(turns: list[Turn], number: int) -> EngineState:
    """The state in which a transfer has just begun."""
    for turn in turns:
        state = turn.transition.state
        if any(one.number == number for one in state.tiers.transfers):
            return state
    raise AssertionError("it never began")

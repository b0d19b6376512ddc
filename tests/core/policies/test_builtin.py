"""What each policy guarantees, on engines that run: Hypothesis looks for a
counterexample.
"""

import math
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from attrs import evolve, field, frozen
from hypothesis import given

from minfer.engine import step
from minfer.policies.builtin import (
    POLICIES,
    PROMPT_TOKENS_PER_OUTPUT,
    Ageing,
    Deadline,
    Fair,
    Priority,
    Shortest,
    Static,
    Window,
    policy_named,
)
from minfer.policies.fair_queue import FairQueue
from minfer.records.config import EngineConfig
from minfer.records.messages import (
    Admitted,
    Cancel,
    Emit,
    Event,
    Execute,
    Submit,
    Tick,
    WakeAt,
)
from minfer.records.policy import FirstCome, Load, Policy, Rank
from minfer.records.request import Request
from minfer.records.state import EngineState, initial
from minfer.simulation.oracle import Oracle
from minfer.testing.ledger import Ledger
from minfer.values.checks import ConfigError
from tests.circles import examples

CONFIG = EngineConfig(
    num_blocks=16,
    block_size=4,
    max_model_len=48,
    max_num_seqs=1,
    max_num_batched_tokens=8,
    vocab_size=50,
    depth=2,
)
PACE = 1.0  # seconds between turns, at most


@frozen
class Arrival:
    """A request, and when it comes and goes."""

    time: float
    request: Request
    cancelled: float = math.inf


@frozen
class Run:
    """What happened to requests: when each was first admitted, in order, and who was
    held.
    """

    arrivals: list[Arrival] = field(
        factory=list
    )  # at the time of the turn that took them
    admitted: dict[str, float] = field(factory=dict)
    ended: dict[str, float] = field(factory=dict)
    waits: list[tuple[float, set[str]]] = field(
        factory=list
    )  # until when it let whom wait
    batches: list[tuple[float, set[str], set[str]]] = field(
        factory=list
    )  # time, new, running

    def arrival(self, name: str) -> Arrival:
        return next(a for a in self.arrivals if a.request.id == name)

    def overtaken(self) -> list[tuple[Arrival, Arrival]]:
        """(who was there first, who was admitted before it all the same)."""
        pairs = []
        for mine in self.arrivals:
            start = self.admitted.get(mine.request.id, math.inf)
            for other in self.arrivals:
                theirs = self.admitted.get(other.request.id, math.inf)
                if other.time > mine.time and theirs < start and mine.cancelled > theirs:
                    pairs.append((mine, other))
        return pairs


def run(arrivals: list[Arrival], policy: Policy, rows: int = 1) -> Run:
    """Serve all arrivals on the oracle, each turn checked; everybody must end."""
    config = evolve(CONFIG, policy=policy, max_num_seqs=rows)
    result, ledger = Run(), Ledger(config, initial(config))
    state, oracle, now, turns = initial(config), Oracle(config.block_size, 50), 0.0, 0
    coming = sorted(arrivals, key=lambda a: a.time)
    going = sorted(
        (a for a in arrivals if a.cancelled < math.inf), key=lambda a: a.cancelled
    )
    while coming or state.requests:
        turns += 1
        assert turns < 4000, f"not drained: {state.blocked}"
        events: list[Event] = [Tick(now)]
        events += [oracle.collect()] if oracle.plans else []
        while coming and coming[0].time <= now:
            result.arrivals.append(evolve(coming[0], time=now))
            events.append(Submit(coming.pop(0).request))
        while going and going[0].cancelled <= now:
            events.append(Cancel(going.pop(0).request.id))
        before = state
        turn = step(config, before, tuple(events))
        state = turn.state
        ledger.take(events, turn)
        _note(result, before, turn.state, turn.reasons, now)
        wake = math.inf
        for command in turn.commands:
            if isinstance(command, Execute):
                oracle.launch(command.plan)
            elif isinstance(command, Emit):
                result.ended.update((done.id, now) for done in command.finished)
            elif isinstance(command, WakeAt):
                wake = command.time
                result.waits.append((wake, {seq.request.id for seq in state.waiting}))
        soon = min(
            (wake, *(a.time for a in coming[:1]), *(a.cancelled for a in going[:1]))
        )
        now = now + PACE if oracle.plans else max(now, min(now + PACE, soon))
    assert set(result.ended) == {a.request.id for a in arrivals}
    return result


def _note(
    result: Run,
    before: EngineState,
    after: EngineState,
    reasons: tuple[Any, ...],
    now: float,
) -> None:
    new = [
        r.id for r in reasons if isinstance(r, Admitted) and r.id not in result.admitted
    ]
    result.admitted.update(dict.fromkeys(new, now))
    if new:
        kept = {name for name, _ in before.running.ids} & {
            name for name, _ in after.running.ids
        }
        result.batches.append((now, set(new), kept))


@st.composite
def workloads(draw: st.DrawFn, most: int = 14) -> list[Arrival]:
    """Requests of all kinds: bursts and pauses, several clients, priorities and
    deadlines.
    """
    out, time = [], 0.0
    for i in range(draw(st.integers(1, most))):
        time += draw(st.sampled_from((0.0, 0.0, 0.4, 1.0, 3.0, 9.0)))
        request = Request(
            id=f"r{i}",
            prompt=tuple(range(draw(st.integers(1, 14)))),
            max_tokens=draw(st.integers(1, 20)),
            priority=draw(st.integers(-3, 3)),
            client=draw(st.sampled_from("abc")),
            deadline=draw(st.sampled_from((1.0, 5.0, 30.0, math.inf))),
        )
        gone = draw(st.sampled_from((math.inf, math.inf, math.inf, 2.0)))
        out.append(Arrival(time, request, time + gone))
    return out


quick = examples(8)


@pytest.mark.long
@quick
@given(workloads())
def test_first_come_is_first_served(work: list[Arrival]) -> None:
    assert not run(work, FirstCome()).overtaken()


@pytest.mark.long
@quick
@given(workloads())
def test_strict_priority_never_lets_the_less_urgent_first(work: list[Arrival]) -> None:
    for mine, other in run(work, Priority()).overtaken():
        assert other.request.priority < mine.request.priority


@pytest.mark.long
@quick
@given(workloads(), st.sampled_from((0.5, 3.0)), st.sampled_from((0, 1, 8)))
def test_ageing_bounds_who_may_overtake(
    work: list[Arrival], seconds: float, levels: int
) -> None:
    for mine, other in run(work, Ageing(seconds, levels)).overtaken():
        gap = other.time - mine.time
        assert gap < seconds * (mine.request.priority - other.request.priority)
        assert gap <= 2 * seconds * levels


@pytest.mark.long
@quick
@given(workloads(), st.sampled_from((0.0, 4.0, 60.0)))
def test_deadlines_are_served_in_order(work: list[Arrival], slack: float) -> None:
    def due(a: Arrival) -> float:
        return a.time + (slack if a.request.deadline == math.inf else a.request.deadline)

    for mine, other in run(work, Deadline(slack)).overtaken():
        assert due(other) < due(mine)
        assert other.time < due(mine)  # so no request starves


@pytest.mark.long
@quick
@given(workloads(), st.sampled_from((0.0, 0.5, 10.0)))
def test_shortest_lets_work_be_outwaited(work: list[Arrival], pace: float) -> None:
    def size(a: Arrival) -> float:
        return len(a.request.prompt) / PROMPT_TOKENS_PER_OUTPUT + a.request.max_tokens

    for mine, other in run(work, Shortest(pace)).overtaken():
        assert size(other) < size(mine)
        assert other.time - mine.time < pace * size(mine)


def test_shortest_counts_what_was_done_before_a_preemption() -> None:
    request = Request(id="r", prompt=(1, 2, 3, 4), max_tokens=10)
    policy = Shortest(1.0)
    assert policy.requeue_rank(None, (99.0,), request, 5.0, 6) == (
        5.0 + 4 / PROMPT_TOKENS_PER_OUTPUT + 4,
    )


def _nothing_of_the_client_before(work: list[Arrival], mine: Arrival) -> bool:
    return not any(
        a.request.client == mine.request.client
        and a.request.priority == mine.request.priority
        and (a.time, int(a.request.id[1:])) < (mine.time, int(mine.request.id[1:]))
        for a in work
    )


@pytest.mark.long
@quick
@given(workloads())
def test_fair_overtakes_by_class_then_between_clients_and_never_within_one(
    work: list[Arrival],
) -> None:
    for mine, other in run(work, FairQueue()).overtaken():
        has, wants = mine.request, other.request
        assert wants.priority <= has.priority, "a less urgent one went first"
        if wants.priority == has.priority:
            assert wants.client != has.client, "a client's later one went first"
            first = _nothing_of_the_client_before(work, mine)
            assert not first, "a request passed the first of a client"


def _asks(client: str, *sizes: int, time: float = 0.0, **more: Any) -> list[Arrival]:
    """Requests of a client, each of a token and some that it may write."""
    return [
        Arrival(
            time,
            Request(
                id=f"{client}{time:g}.{i}",
                prompt=(1,),
                max_tokens=size,
                client=client,
                **more,
            ),
        )
        for i, size in enumerate(sizes)
    ]


def test_fair_keeps_a_clients_order_after_it_has_been_given_back_much() -> None:
    """The second has to wait for what the first may use, which it does not use: what
    comes then could start earlier, were it not for the second.
    """
    first, second = _asks("a", 40, 4)
    third = _asks("a", 4, time=3.0)
    others = _asks("b", *[4] * 8)
    work = [evolve(first, cancelled=2.0), second, *others, *third]
    order = list(run(work, FairQueue()).admitted)
    assert order.index("a0.1") < order.index("a3.0")
    former = list(run(work, Fair()).admitted)
    assert former.index("a0.1") > former.index("a3.0"), "the case is none"


def test_fair_lets_an_urgent_class_take_a_place_and_starves_no_client_of_it() -> None:
    batch = _asks("a", *[6] * 4, priority=1)
    urgent = [*_asks("b", *[6] * 3, time=3.0), *_asks("c", 6, time=3.5)]
    result = run([*batch, *urgent], FairQueue())
    order = [name[0] for name in result.admitted]
    assert order == ["a", "b", "c", "b", "b", "a", "a", "a"]
    assert result.admitted["b3.0"] == 3.0, "it took the place of one that ran"


def test_fair_charges_no_client_for_what_its_class_has_waited_for_others() -> None:
    """While the urgent class is served, two clients of the other come one after the
    other: they share as if no other had been served.
    """
    urgent = _asks("u", *[20] * 3, priority=-1)
    work = [*urgent, *_asks("a", *[6] * 4, time=1.0), *_asks("b", *[6] * 4, time=40.0)]
    order = [name[0] for name in run(work, FairQueue()).admitted]
    assert order == ["u"] * 3 + ["a", "b"] * 4


@pytest.mark.long
@quick
@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(1, 14), st.integers(1, 20)),
        min_size=4,
        max_size=24,
    )
)
def test_fair_shares_stay_within_the_largest_requests(
    wants: list[tuple[str, int, int]],
) -> None:
    """Everybody is in line from the start, so both clients wait until one has nothing
    left.
    """
    work = [
        Arrival(
            0.0, Request(id=f"r{i}", prompt=(1,) * prompt, max_tokens=most, client=client)
        )
        for i, (client, prompt, most) in enumerate(wants)
    ]
    cost = {a.request.id: len(a.request.prompt) + a.request.max_tokens for a in work}
    largest = sum(
        max((cost[a.request.id] for a in work if a.request.client == c), default=0)
        for c in "ab"
    )
    result, had = run(work, FairQueue()), {"a": 0, "b": 0}
    left = {c: sum(a.request.client == c for a in work) for c in "ab"}
    for name in result.admitted:  # in order
        if not all(left.values()):
            break
        client = result.arrival(name).request.client
        had[client] += cost[name]
        left[client] -= 1
        assert abs(had["a"] - had["b"]) <= largest


@pytest.mark.long
@examples(3)
@given(st.integers(6, 12), st.integers(1, 3), st.integers(4, 8))
def test_fair_lets_no_client_save_up(many: int, before: int, after: int) -> None:
    """A client that was idle for a while is not owed what it did not ask for."""

    def asks(client: str, first: int, count: int, time: float) -> list[Arrival]:
        names = (f"{client}{i}" for i in range(first, first + count))
        return [
            Arrival(time, Request(id=name, prompt=(1,) * 6, max_tokens=6, client=client))
            for name in names
        ]

    work = [
        *asks("a", 0, 2 * many, 0.0),
        *asks("b", 0, before, 0.0),
        *asks("b", before, after, 70),
    ]
    result = run(work, FairQueue())
    late = [name for name, time in result.admitted.items() if time > 70]
    both = next(i for i, _ in enumerate(late) if len({n[0] for n in late[i:]}) == 1)
    share = [name[0] for name in late[:both]]
    assert abs(share.count("a") - share.count("b")) <= 2


LOAD = Load(time=0.0, waiting=1, running=0, available=9, arrived=0.0, budget=8)


@pytest.mark.long
@quick
@given(workloads(), st.sampled_from((0.0, 0.7, 2.5)), st.integers(1, 5))
def test_the_window_delays_no_request_longer_than_its_wait(
    work: list[Arrival], wait: float, fill: int
) -> None:
    policy = Window(2.0, 2, wait=wait, fill=fill, urgent=-2, part=0.5)
    result = run(work, policy, rows=2)
    for until, names in result.waits:
        for mine in map(result.arrival, names):
            assert until <= mine.time + min(wait, 0.5 * mine.request.deadline)
            assert mine.request.priority > -2
    for mine, other in result.overtaken():
        assert other.time - mine.time < 2.0 * (
            mine.request.priority - other.request.priority
        )


def test_the_window_gathers_a_batch_and_goes_early_when_it_is_full_or_pointless() -> None:
    def came(*times: float) -> list[Arrival]:
        return [
            Arrival(t, Request(id=f"r{i}", prompt=(1, 2), max_tokens=3))
            for i, t in enumerate(times)
        ]

    policy = Window(wait=4.0, fill=3)
    together = run(came(0.0, 1.0, 2.0, 3.0), policy, rows=4)
    assert list(together.admitted.values()) == [
        0.0,
        3.0,
        3.0,
        3.0,
    ]  # a pace is known; full
    timely = run(came(0.0, 1.0, 2.0, 20.0), policy, rows=4)
    assert list(timely.admitted.values()) == [
        0.0,
        5.0,
        5.0,
        20.0,
    ]  # none waits longer than 4 s
    solo = run(came(0.0), policy)
    assert solo.admitted["r0"] == 0.0  # at no known pace would it fill
    slow = run(came(0.0, 30.0, 60.0), policy)
    assert list(slow.admitted.values()) == [0.0, 30.0, 60.0]  # nor at this one
    urgent = evolve(came(0.0)[0].request, id="u", priority=-1)
    rush = run([*came(0.0, 1.0), Arrival(1.0, urgent)], Window(wait=9.0, fill=9), rows=4)
    assert rush.admitted["u"] == 1.0


@pytest.mark.long
@quick
@given(workloads(), st.integers(1, 3))
def test_static_batches_are_closed_until_they_end(work: list[Arrival], size: int) -> None:
    result = run(work, Static(size), rows=4)
    assert not result.overtaken()
    opened: dict[str, float] = {}  # of the batch that each is in
    for time, new, running in result.batches:
        start = max((opened[name] for name in running), default=time)
        opened.update(dict.fromkeys(new, start))
        assert all(result.arrival(name).time <= start for name in new)
    for start in set(opened.values()):
        assert sum(s == start for s in opened.values()) <= size


@pytest.mark.long
@pytest.mark.parametrize("name", POLICIES)
@examples(3)
@given(work=workloads())
def test_every_policy_ends_every_request_and_decides_alike_twice(
    name: str, work: list[Arrival]
) -> None:
    policy = policy_named(name)
    assert run(work, policy, rows=3) == run(work, policy, rows=3)


@frozen
class Never(FirstCome):
    """Waits for ever."""

    def admit_from(self, state: Any, load: Load) -> float:
        del state, load
        return math.inf


@frozen
class Worse(FirstCome):
    """Wants preempted sequences at the end of the line."""

    def rank(self, state: Any, request: Request, time: float) -> tuple[Rank, Any]:
        del request, time
        return (0.0,), state

    def requeue_rank(
        self, state: Any, rank: Rank, request: Request, arrived: float, done: int
    ) -> Rank:
        del state, rank, request, arrived, done
        return (1e9,)


@pytest.mark.long
@pytest.mark.parametrize("make", [Never, Worse])
@quick
@given(work=workloads())
def test_a_bad_policy_cannot_stop_the_engine(
    make: Callable[[], Policy], work: list[Arrival]
) -> None:
    run(work, make())


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("fcfs", FirstCome()),
        ("ageing:seconds=2.5,levels=3", Ageing(2.5, 3)),
        ("window:wait=0.2,fill=4,urgent=-2", Window(wait=0.2, fill=4, urgent=-2)),
        ("static:size=16", Static(16)),
    ],
)
def test_policies_by_name(text: str, policy: Policy) -> None:
    assert policy_named(text) == policy


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("lottery", "must be one of fcfs"),
        ("fcfs:x=1", "no option 'x'"),
        ("ageing:seconds", "must be a number"),
        ("ageing:seconds=0", "above 0"),
        ("ageing:seconds=nan", "above 0"),
        ("ageing:seconds=inf", "above 0"),
        ("static:size=2.5", "must be a number"),
        ("window:fill=0", "from 1"),
        ("window:part=0", "part must be a number above 0"),
        ("fair:weights=1", "no option 'weights'"),
    ],
)
def test_bad_names_of_policies(text: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        policy_named(text)

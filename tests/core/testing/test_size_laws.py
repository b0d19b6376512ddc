"""Collections that grow are named, every collection has a bound, and long runs stay as
small as they began.
"""

import pickle
from collections.abc import Collection
from operator import attrgetter
from random import Random
from typing import Any, get_origin

import attrs
import pytest
from attrs import evolve

from minfer.blocks.keys import root_key
from minfer.engine import step
from minfer.policies.builtin import POLICIES, Fair, Shares
from minfer.policies.fair_queue import Account, FairQueue
from minfer.policies.fair_seats import Beside, FairSeats, Seats
from minfer.records.acceptance import Costs
from minfer.records.config import EngineConfig
from minfer.records.drafting import Drafting, Proposed
from minfer.records.messages import Event, Executed, Propose, Submit, Tick
from minfer.records.plan import Plan
from minfer.records.policy import Policy
from minfer.records.request import Request
from minfer.records.sequence import SampleId
from minfer.records.speculation import DEVICE, HOST, Speculation
from minfer.records.state import BlockedHead, EngineState, initial
from minfer.testing.invariants import InvariantError
from minfer.testing.size_laws import check_sizes, policy_limits, size_limits
from minfer.values.log import Log
from minfer.values.pmap import Map
from tests.circles import claimed, long
from tests.core.test_engine import CONFIG
from tests.core.testing.turns import blocks_with, busy, run_with
from tests.core.tuned import tuned


def collections(kind: type, path: str = "") -> set[str]:
    """The names of the fields of records that hold many of something."""
    found = set[str]()
    for one in attrs.fields(attrs.resolve_types(kind)):
        of: Any = get_origin(one.type) or one.type
        if attrs.has(of):
            found |= collections(of, f"{path}{one.name}.")
        elif isinstance(of, type) and issubclass(of, Map | Collection):
            found |= {path + one.name} if of not in (str, bytes) else set()
    return found


def test_every_collection_of_a_state_has_a_bound() -> None:
    state = initial(CONFIG)
    assert collections(EngineState) == size_limits(CONFIG, state, state).keys()


@pytest.mark.parametrize("policy", [*(kind() for kind in POLICIES.values()), Fair()])
def test_every_map_of_a_policy_has_a_bound(policy: Policy) -> None:
    own = policy.start()
    if attrs.has(type(own)):
        state = evolve(initial(CONFIG), policy=own)
        assert collections(type(own)) == policy_limits(state, 0).keys()
    else:
        assert own is None or set(map(type, own)) <= {int, float}


def _grown(state: EngineState) -> list[EngineState]:
    """States in which one collection each has more than it may have."""
    run = state.running
    pool, many = state.blocks.pool, [(f"n{i}", 0) for i in range(99)]
    name, live = next(iter(state.requests.items()))
    moved = evolve(live, moved=((0, ()), (1, ())))
    proposals: Map[SampleId, Proposed] = Map(dict.fromkeys(many, Proposed(1, (1,))))
    drafting = Drafting(proposals=proposals)
    return [
        blocks_with(state, freed=pool.freed.set(len(pool.freed), ())),
        blocks_with(state, freed=Map(dict.fromkeys(range(99), ()))),
        blocks_with(state, words=Map(dict.fromkeys(range(99), 1))),
        evolve(state, waiting=evolve(state.waiting, counts=Map({"gone": 1}))),
        evolve(state, waiting=evolve(state.waiting, buckets=((),))),
        evolve(state, stops=frozenset(range(999))),
        evolve(state, requests=Map(dict.fromkeys([who for who, _ in many], live))),
        evolve(state, requests=state.requests.set(name, moved)),
        evolve(state, faults=tuple((who, 1) for who in many)),
        evolve(state, paused=frozenset(many)),
        evolve(state, drafting=drafting),
        evolve(state, deferred_clients=frozenset({"gone"})),
        evolve(state, overrides=(BlockedHead((), ""),)),  # type: ignore[arg-type]  # counted only
        evolve(state, policy=Shares(tags=Map({"a": 0.0, "b": 0.0}), limit=1)),
        evolve(state, policy=Seats(times=Map({0: 1.0}))),
        evolve(state, policy=Seats(beside=Map({"gone": Beside(1, 0.0)}))),
        evolve(state, policy=Seats(by_owner=Map({(0, ""): Account()}), limit=0)),
        evolve(state, policy=Seats(held=Map(dict.fromkeys("abcdefgh", Map({0: 1}))))),
        run_with(state, tables=((Log(tuple(range(16))),), *run.tables[1:])),
    ]


@pytest.mark.parametrize("number", range(19))
def test_a_collection_that_grows_is_named(number: int) -> None:
    state = busy(depth=1).state
    check_sizes(CONFIG, state, state)
    grown = _grown(state)
    assert len(grown) == 19
    with pytest.raises(InvariantError, match="size: "):
        check_sizes(CONFIG, state, grown[number])


def test_no_empty_run_is_kept_when_more_is_evicted_than_a_run_holds() -> None:
    """With no block free, what is evicted for a newcomer passes through the pool."""
    config = EngineConfig(num_blocks=12, block_size=1, max_num_seqs=1, freed_run=4)
    state, seen = initial(config), set[int]()
    for number in range(120):
        ask = Request(id=f"r{number}", prompt=(number,) * 8, max_tokens=2)
        for events in ((Submit(ask),), *[()] * 6):
            done = [Executed(p.step, _tokens(p)) for p in state.inflight[:1]]
            state = step(config, state, (*done, *events)).state
        seen.add(len(state.blocks.pool.freed))
    assert max(seen) <= 1


# --- long runs --------------------------------------------------------------------------


def _tokens(plan: Plan, rng: Random | None = None) -> tuple[tuple[int, ...], ...]:
    """What a plan yields: of drafts, some are accepted."""
    least = [min(1, most) for most in plan.max_sampled_tokens]
    each = zip(least, plan.max_sampled_tokens, strict=True)
    return tuple((5,) * (rng.randint(*pair) if rng else pair[0]) for pair in each)


def _request(number: int, rng: Random) -> Request:
    """Prompts share their first blocks; clients and stop ids do not repeat."""
    kind = rng.randrange(6)
    return Request(
        id=f"r{number}",
        prompt=(kind,) * rng.randint(4, 20) + tuple(rng.choices(range(100), k=5)),
        max_tokens=rng.choice((1, 6, 12)),
        n=rng.choice((1, 1, 1, 2)),
        priority=rng.choice((0, 0, 1, number % 10_000)),
        client=rng.choice(("a", "b", f"c{number}")),
        stop_ids=frozenset({1000 + number}),
        root=root_key(b"", b""),
        needs_host_mask=rng.random() < 0.1,
    )


def _lengths(policy: Policy, drafter: str, turns: int) -> list[dict[str, int]]:
    """The sizes of a state every so often, while requests come and go."""
    costs = Costs(((64, 1.0),))
    config = EngineConfig(
        num_blocks=40,
        block_size=4,
        max_model_len=48,
        max_num_seqs=6,
        max_num_batched_tokens=64,
        freed_run=3,
        policy=policy,
        speculation=Speculation(drafter=drafter, drafts=3, rows=0, costs=costs),
    )
    rng, state, found = Random(f"{policy} {drafter}"), initial(config), []
    came, known = 0, dict[SampleId, int]()
    names = size_limits(config, state, state)
    for number in range(turns):
        events: list[Event] = [Tick(number / 20)]
        events += [Executed(p.step, _tokens(p, rng)) for p in state.inflight[:1]]
        while len(state.waiting) + len(events) < 6:
            events.append(Submit(_request(came, rng)))
            came += 1
        if drafter == HOST:
            events += [Propose(*name, most, (5, 5)) for name, most in known.items()]
        turn = step(config, state, tuple(events))
        state = turn.state
        known = dict(zip(state.running.ids, state.running.known, strict=True))
        if number % 10 == 0:
            size = {name: len(attrgetter(name)(state)) for name in names}
            found.append(size | {"pickled": len(pickle.dumps(state))})
    assert came > turns / 20
    return found


# Few clients are remembered, so that all are after few turns.
EVERY = [
    *(kind() for name, kind in POLICIES.items() if name != "fair"),
    *(kind(clients=8) for kind in (FairSeats, FairQueue, Fair)),
]
EACH = [(policy, (HOST, DEVICE)[i % 2]) for i, policy in enumerate(EVERY)]


@pytest.mark.parametrize(
    ("policy", "drafter", "turns"),
    [
        *long((policy, drafter, 500) for policy, drafter in EACH),
        *claimed((policy, drafter, 100_000) for policy, drafter in EACH),
    ],
)
def test_a_long_run_ends_as_small_as_it_began(
    policy: Policy, drafter: str, turns: int
) -> None:
    with tuned(STOP_IDS=32):  # or few turns do not show that they are sorted out
        found = _lengths(policy, drafter, turns)
    part = len(found) // 5
    for name in found[0]:
        early = max(one[name] for one in found[part : 2 * part])
        late = max(one[name] for one in found[-part:])
        assert late <= early * 1.25 + 8, f"{name}: {early} entries, then {late}"

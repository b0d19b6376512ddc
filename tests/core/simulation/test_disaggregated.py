"""Prefill apart from decode on one virtual clock: who computes what, and when."""

from collections import Counter
from typing import Any

import pytest
from attrs import evolve

from minfer.blocks.keys import block_keys
from minfer.records.config import CacheGroup
from minfer.records.messages import Cancel, Emit, Execute
from minfer.records.request import Request
from minfer.records.tiers import LOAD, ExternalStore
from minfer.routing.policies import LeastLoaded, Prefix
from minfer.routing.state import RouterConfig
from minfer.simulation import disaggregated as simulate_disaggregated
from minfer.simulation import replicas as simulate_replicas
from minfer.simulation.disaggregated import DisaggregatedSimulation
from minfer.simulation.replicas import ReplicaTurn
from minfer.simulation.simulate import Arrival
from tests.core.simulation.test_replicas import chats, ignored_events
from tests.core.simulation.test_simulate import EVEN, config_of

TIER = ExternalStore(max_known_keys=256, push_only=True, choice=LOAD, page_seconds=3.0)


def simulation(arrivals: list[Arrival], **more: Any) -> DisaggregatedSimulation:
    how: dict[str, Any] = {
        "names": ("c", "d"),
        "prefill": ("a", "b"),
        "direct": 3,
        "router": RouterConfig(Prefix(token=0.1, row=0.01), 4),
        **more,
    }
    config = how.pop("config", evolve(config_of(), external_store=TIER))
    return DisaggregatedSimulation(
        config,
        cost=EVEN,
        arrivals=arrivals,
        prefill_config=how.pop("prefill_config", config_of()),
        prefill_router=RouterConfig(LeastLoaded(), 4),
        **how,
    )


def request(name: str, prompt: int, most: int = 3) -> Request:
    tokens = (7,) * prompt
    keys = block_keys(name.encode(), tokens, 4)
    return Request(id=name, prompt=tokens, max_tokens=most, keys=keys)


def tokens(run: DisaggregatedSimulation) -> dict[str, list[tuple[str, float]]]:
    """The replica and the time of each token of a request."""
    found = dict[str, list[tuple[str, float]]]()
    for one in run.run():
        if not isinstance(one, ReplicaTurn):
            continue
        now = one.turn.transition.state.time
        for command in one.turn.transition.commands:
            if isinstance(command, Emit):
                for (name, _), new in zip(command.ids, command.tokens, strict=True):
                    found.setdefault(name, []).extend([(one.replica, now)] * len(new))
    return found


def test_a_step_a_transfer_of_what_is_missing_and_steps() -> None:
    """The prompt takes a second, its two full blocks three each, and a token one."""
    found = tokens(simulation([(0.0, request("x", 9))]))
    assert found == {"x": [("a", 1.0), ("c", 8.0), ("c", 9.0)]}


def test_what_the_decode_replica_has_is_not_sent() -> None:
    """A prompt that continues another one: of its four blocks two are there."""
    longer = Request(
        id="y",
        prompt=(7,) * 17,
        max_tokens=2,
        keys=block_keys(b"x", (7,) * 17, 4),
    )
    found = tokens(simulation([(0.0, request("x", 9)), (20.0, longer)]))
    assert found["y"] == [("a", 21.0), ("c", 28.0)]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_state_is_sent_with_the_blocks_before_it(depth: int) -> None:
    """A transfer of two blocks and a state of two pages takes twelve seconds; the decode
    replica computes the token behind them.
    """
    groups = CacheGroup(), CacheGroup(state=True, pages=2)
    run = simulation([(0.0, request("x", 9))])
    run = simulation(
        [(0.0, request("x", 9))],
        config=evolve(run.config, groups=groups, depth=depth),
        prefill_config=evolve(run.prefill_config, groups=groups, depth=depth),
    )
    found = tokens(run)
    assert [replica for replica, _ in found["x"]] == ["a", "c", "c"]
    # The prefill replica has a step more: its state is kept at the end of the last block.
    assert [time for _, time in found["x"]] == [2.0, 15.0, 16.0]


def test_short_prompts_and_single_tokens_stay_where_they_decode() -> None:
    come: list[Arrival] = [(0.0, request("x", 3)), (0.0, request("y", 9, most=1))]
    assert {replica for replica, _ in tokens(simulation(come))["x"]} == {"c"}
    assert {replica for replica, _ in tokens(simulation(come))["y"]} == {"d"}


def test_all_is_served_and_no_prompt_is_computed_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ignored = ignored_events(monkeypatch, simulate_replicas, simulate_disaggregated)
    arrivals = chats(60)
    run, counts, most = simulation(arrivals), Counter[str](), 0
    for one in run.run():
        if not isinstance(one, ReplicaTurn):
            continue
        for command in one.turn.transition.commands:
            if isinstance(command, Emit):
                each = zip(command.ids, command.tokens, strict=True)
                counts.update({name: len(new) for (name, _), new in each})
            elif isinstance(command, Execute) and one.replica in run.names:
                fills = command.plan.fills
                most = max([most, *(len(fill.tokens) for fill in fills)])
    cancelled = {what.id for _, what in arrivals if isinstance(what, Cancel)}
    for _, what in arrivals:
        if isinstance(what, Request) and what.id not in cancelled:
            assert counts[what.id] == what.max_tokens
    assert most <= run.direct + run.config.block_size
    for state in (run.state, run.prefill_state):
        assert dict(state.requests) == {}
        assert all(one.requests == one.backlog == 0 for one in state.replicas.values())
    assert ignored == []


@pytest.mark.parametrize("time", [0.5, 4.0, 8.5])
def test_a_request_is_cancelled_while_it_is_computed_sent_or_decoded(
    time: float,
) -> None:
    run = simulation([(0.0, request("x", 9, most=30)), (time, Cancel("x"))])
    last = max(at for _, at in tokens(run).get("x", [("", 0.0)]))
    assert last <= time + 1
    assert not run.state.requests
    assert not run.prefill_state.requests

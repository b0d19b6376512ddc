"""A policy's own state that does not fit who is here is named, and under a flood none
waits for ever.
"""

from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve

from minfer.policies.builtin import POLICIES, Fair, Window
from minfer.policies.fair_queue import Account, FairQueue
from minfer.policies.fair_seats import FairSeats
from minfer.records.messages import Submit
from minfer.records.policy import FirstCome, Policy
from minfer.records.state import EngineState
from minfer.testing.invariants import InvariantError
from minfer.testing.policy_laws import check_policy_state
from tests.core.test_engine import CONFIG, Bench, ask


def begun(policy: Policy) -> Bench:
    """Four run, and two wait."""
    bench = Bench(evolve(CONFIG, policy=policy))
    bench.give(*(Submit(ask("x" * n, 4, 9, client=f"c{n % 2}")) for n in range(1, 7)))
    bench.turn()
    assert (len(bench.state.running), len(bench.state.waiting)) == (4, 2)
    return bench


def _own(name: str, value: Callable[[Any], Any]) -> Callable[[EngineState], EngineState]:
    def wrong(state: EngineState) -> EngineState:
        own = state.policy
        return evolve(state, policy=evolve(own, **{name: value(getattr(own, name))}))

    return wrong


@pytest.mark.parametrize(
    ("policy", "wrong", "law"),
    [
        (FirstCome(), lambda state: evolve(state, policy=5), "policy: FirstCome keeps"),
        (Window(), _own("fresh", lambda _: 3), "policy: 3 have come"),
        (Window(), _own("fresh", lambda _: -1), "policy: -1 have come"),
        (
            FairQueue(),
            _own("by_owner", lambda of: of.set((0, "c1"), Account(live=2))),
            "policy: accounts of",
        ),
        (FairSeats(), _own("by_owner", lambda of: of.delete((0, "c0"))), "policy: acc"),
        (FairSeats(), _own("held", lambda of: of.delete("c1")), "policy: seats of"),
        (FairSeats(), _own("taken", lambda of: of.set(0, 5)), "policy: .* taken, not"),
    ],
)
def test_a_state_that_does_not_fit_is_named(
    policy: Policy, wrong: Callable[[EngineState], EngineState], law: str
) -> None:
    bench = begun(policy)
    check_policy_state(bench.config, bench.state)
    with pytest.raises(InvariantError, match=law):
        check_policy_state(bench.config, wrong(bench.state))


@pytest.mark.long
@pytest.mark.parametrize("policy", [*(kind() for kind in POLICIES.values()), Fair()])
def test_under_a_flood_the_wait_of_each_is_bounded(policy: Policy) -> None:
    """More come in each turn than can be served; who was there before is let in when
    those ahead of it have ended.
    """
    config = evolve(CONFIG, policy=policy, num_blocks=64)
    bench, made = Bench(config), 0

    def flood(count: int) -> list[Submit]:
        nonlocal made
        made += count
        return [Submit(ask(f"r{made - i}", 4, 4, client="flood")) for i in range(count)]

    def turn(*events: Submit) -> None:
        done = (bench.oracle.collect(),) if bench.oracle.plans else ()
        bench.give(*done, *events)

    turn(*flood(8))
    mine = ask("mine", 4, 4, client="mine")
    turn(Submit(mine))
    ahead, waited = len(bench.state.waiting), 0
    while "mine" in bench.state.requests:
        turn(*flood(2))
        waited += 1
        # Each of those ahead of it, and it, takes a row for a prompt and 4 tokens.
        assert waited <= 6 * (ahead + 2 * config.max_num_seqs), "it waits for ever"
    assert bench.out["mine", 0] == bench.right(mine)
    assert len(bench.state.waiting) > ahead

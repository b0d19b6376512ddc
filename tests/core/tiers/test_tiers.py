"""Blocks that are stored in host memory, and loaded from there."""

from typing import Any

import pytest
from attrs import evolve

from minfer.blocks.keys import block_keys, tail_keys
from minfer.records.config import CacheGroup
from minfer.records.messages import (
    Admitted,
    Cancel,
    Ignored,
    Loading,
    Lost,
    LostBlocks,
    Moved,
    Preempted,
    QueueBlocked,
    Recomputing,
    Submit,
)
from minfer.records.request import Continuation
from minfer.records.state import pages_coming
from minfer.records.tiers import BY_COST, LOAD, RECOMPUTE, HostTier
from minfer.values.checks import ConfigError
from tests.core.test_engine import CONFIG, ask
from tests.core.tiers.hosted import HOST, TIGHT, Hosted

LONG = ask("long", 18, max_tokens=2)  # four full blocks, and two tokens more
AGAIN = evolve(LONG, id="again")


def keys_of(request: Any, count: int = 4) -> tuple[bytes, ...]:
    return block_keys(request.root, request.prompt, 4)[:count]


def test_what_the_device_evicts_is_loaded() -> None:
    bench = Hosted()
    assert bench.serve(LONG) == bench.right(LONG)
    host = bench.state.tiers.host
    assert host is not None
    assert {*keys_of(LONG)} <= {*host.prefix.nodes}
    bench.push_out()
    assert not {*keys_of(LONG)} & {*bench.state.blocks.prefix.nodes}
    before = bench.computed
    assert bench.serve(AGAIN) == bench.right(LONG)
    [load], [reason] = bench.loads, bench.reasons_of(Loading)
    assert (reason.id, reason.blocks, reason.hit, len(load.sources)) == ("again", 4, 0, 4)
    assert bench.computed - before == 2  # of 18
    assert bench.reasons_of(Admitted)[-1].hit == 16
    assert bench.state.blocks.available == TIGHT.num_blocks


def test_only_what_the_device_lacks_is_loaded() -> None:
    bench = Hosted()
    bench.serve(LONG)
    bench.push_out()
    bench.serve(evolve(LONG, id="begin", prompt=LONG.prompt[:9]))  # loads two blocks
    bench.serve(AGAIN)
    assert [len(move.sources) for move in bench.loads] == [2, 2]
    assert bench.reasons_of(Loading)[-1].hit == 2


@pytest.mark.parametrize(
    ("choice", "seconds", "loads"),
    [
        (BY_COST, 0.9, True),
        (BY_COST, 1.1, False),
        (LOAD, 1.1, True),
        (RECOMPUTE, 0.9, False),
    ],
)
def test_loading_is_chosen_by_cost(choice: str, seconds: float, loads: bool) -> None:
    """16 tokens at 1/16 s, against a fixed part and 4 pages."""
    costs = {"load_seconds": seconds - 0.4, "page_seconds": 0.1}
    bench = Hosted(choice=choice, token_seconds=1 / 16, **costs)
    bench.serve(LONG)
    bench.push_out()
    assert bench.serve(AGAIN) == bench.right(LONG)
    assert len(bench.loads) == loads
    [reason] = bench.reasons_of(Loading if loads else Recomputing)
    assert (reason.blocks, reason.hit) == (4, 0)
    assert reason.seconds == pytest.approx(seconds)
    assert reason.recompute == pytest.approx(1)


def test_what_is_lost_is_computed() -> None:
    bench = Hosted()
    bench.serve(LONG)
    bench.push_out()
    assert not pages_coming(bench.state)
    bench.late = True
    bench.turn(Submit(AGAIN))
    assert not bench.plans or bench.state.tiers.loading == {"again"}
    assert pages_coming(bench.state)
    bench.give(*bench.ends("it was torn"))
    [lost] = bench.reasons_of(LostBlocks)
    assert (lost.blocks, lost.error) == (4, "it was torn")
    bench.late = False
    bench.settle()
    assert bench.out["again", 0] == bench.right(LONG)
    assert bench.reasons_of(Admitted)[-1].hit == 0
    assert len(bench.loads) == 1  # once while it waits


def test_others_pass_a_request_that_loads_and_its_equals_wait_with_it() -> None:
    bench = Hosted(evolve(TIGHT, num_blocks=14))
    bench.serve(LONG)
    for i in range(4):
        bench.serve(ask(f"other{i}", prompt=(40 + i,) * 28, max_tokens=1))
    bench.late = True
    twin = evolve(LONG, id="twin", prompt=(*LONG.prompt, 3))
    short = ask("short", 3, max_tokens=1)
    bench.turn(Submit(AGAIN), Submit(twin), Submit(short))
    assert bench.state.tiers.loading == {"again", "twin"}
    assert [one.id for one in bench.reasons_of(Admitted)][-1] == "short"
    bench.turn()
    assert ("short", 0) in bench.ended
    blocked = bench.reasons_of(QueueBlocked)[-1]
    assert (blocked.id, blocked.cause) == ("again", "loading")
    bench.late = False
    bench.settle()
    assert bench.out["again", 0] == bench.right(LONG)
    assert bench.out["twin", 0] == bench.right(twin)
    assert len(bench.loads) == 1


def test_a_cancelled_request_leaves_its_blocks_to_others() -> None:
    bench = Hosted()
    bench.serve(LONG)
    bench.push_out()
    bench.late = True
    bench.turn(Submit(AGAIN))
    bench.turn(Cancel("again"))
    assert not bench.state.requests
    assert not bench.state.tiers.loading
    assert bench.state.tiers.transfers
    bench.late = False
    bench.settle()
    assert {*keys_of(LONG)} <= {*bench.state.blocks.prefix.nodes}
    assert bench.state.blocks.available == TIGHT.num_blocks


def test_a_preempted_request_resumes_with_what_was_stored() -> None:
    config = evolve(CONFIG, num_blocks=9, max_model_len=40, host=HOST)
    bench = Hosted(config)
    both = [ask("a", 8, max_tokens=20), ask("bb", 8, max_tokens=20)]
    bench.turn(*map(Submit, both))
    bench.settle()
    assert bench.reasons_of(Preempted)
    assert [one.id for one in bench.reasons_of(Loading)] == ["bb"]
    for one in both:
        assert bench.out[one.id, 0] == bench.right(one)


def test_no_more_is_stored_at_once_than_allowed() -> None:
    bench = Hosted(storing=1)
    bench.serve(LONG)
    assert [len(move.sources) for move in bench.stores] == [1] * 4
    host = bench.state.tiers.host
    assert host is not None
    assert {*keys_of(LONG)} <= {*host.prefix.nodes}


def test_a_full_tier_keeps_the_beginnings_of_prefixes() -> None:
    bench = Hosted(pages=6)
    bench.serve(LONG)
    bench.serve(ask("other", prompt=(40,) * 16, max_tokens=1))
    host = bench.state.tiers.host
    assert host is not None
    kept = [key in host.prefix.nodes for key in keys_of(LONG)]
    assert kept == sorted(kept, reverse=True)
    assert 0 < sum(kept) < 4


def test_parents_that_the_tier_lost_are_stored_with_their_children() -> None:
    bench = Hosted(pages=4)
    bench.late = True
    bench.turn(Submit(evolve(LONG, prompt=LONG.prompt[:9])))
    for _ in range(6):
        bench.turn()
    bench.give(*bench.ends("no"))
    assert not bench.state.tiers.transfers
    bench.late = False
    bench.serve(AGAIN)
    host = bench.state.tiers.host
    assert host is not None
    assert {*keys_of(LONG)} == {*host.prefix.nodes}


def test_a_child_whose_parent_was_lost_is_not_kept() -> None:
    bench = Hosted()
    bench.late = True
    bench.turn(Submit(ask("a", 8, max_tokens=9)))
    while bench.state.requests:
        bench.turn()
    assert [len(move.sources) for move in bench.stores] == [2, 1, 1]
    bench.give(bench.oracle.finish_move(0, "no"))
    bench.give(*bench.ends())
    host = bench.state.tiers.host
    assert host is not None
    assert not host.prefix.nodes
    assert host.available == HOST.pages


def test_windows_load_what_the_next_query_reads() -> None:
    groups = (CacheGroup(), CacheGroup(window=5))
    config = evolve(CONFIG, num_blocks=16, groups=groups, host=HOST)
    bench = Hosted(config)
    bench.serve(LONG)
    for i in range(3):
        bench.serve(ask(f"other{i}", prompt=(40 + i,) * 28, max_tokens=1))
    assert not {*keys_of(LONG)} & {*bench.state.blocks.prefix.nodes}
    assert bench.serve(AGAIN) == bench.right(LONG)
    [load] = bench.loads
    assert len(load.sources) == 4 + 1
    assert bench.reasons_of(Admitted)[-1].hit == 16


def test_unknown_transfers_are_ignored() -> None:
    bench = Hosted()
    for event in (Moved(7), Lost(-1, "x"), Moved(None)):  # type: ignore[arg-type]
        bench.give(event)
    assert len(bench.reasons_of(Ignored)) == 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"pages": 0},
        {"storing": 0},
        {"choice": "sometimes"},
        {"load_seconds": -1.0},
        {"page_seconds": float("nan")},
        {"token_seconds": "1"},
    ],
)
def test_sizes_and_costs_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        HostTier(**{"pages": 1, **wrong})
    wide = (CacheGroup(pages=3),)
    with pytest.raises(ConfigError, match="a block has 3"):
        evolve(CONFIG, groups=wide, host=HostTier(pages=2))
    with pytest.raises(ConfigError, match="host must be"):
        evolve(CONFIG, host=7)  # type: ignore[arg-type]


def test_a_load_overwrites_nothing_that_a_plan_in_flight_copies() -> None:
    """Tails that searches left are copied by the first plan; the second of the turn would
    take their pages.
    """

    def tailed(request: Any) -> Any:
        keys = block_keys(request.root, request.prompt, 4)
        return evolve(
            request,
            continuation=Continuation(
                tail_keys=tail_keys(request.root, keys, request.prompt, 4)
            ),
        )

    bench = Hosted(evolve(TIGHT, depth=2))
    bench.serve(LONG)
    bench.push_out()
    for name, rest in (("a1", (1, 2, 3)), ("a2", (4, 5, 6))):
        prompt = (11, 12, 13, 14, *rest)
        bench.serve(tailed(ask(name, prompt=prompt, max_tokens=1)))
    rounds = [
        tailed(ask(name, prompt=(11, 12, 13, 14, *rest, 7), max_tokens=1))
        for name, rest in (("b1", (1, 2, 3)), ("b2", (4, 5, 6)))
    ]
    bench.late = True
    bench.turn(*map(Submit, (*rounds, AGAIN)))
    assert any(plan.copies for plan in bench.plans)
    bench.late = False
    bench.settle()
    for one in (*rounds, AGAIN):
        assert bench.out[one.id, 0] == bench.right(one)


def test_as_many_are_passed_over_as_can_run() -> None:
    bench = Hosted(evolve(TIGHT, max_num_seqs=2, num_blocks=14))
    bench.serve(LONG)
    for i in range(4):
        bench.serve(ask(f"other{i}", prompt=(40 + i,) * 28, max_tokens=1))
    bench.late = True
    twins = [evolve(LONG, id=f"twin{i}") for i in range(4)]
    bench.turn(*map(Submit, twins))
    assert bench.state.tiers.loading == {"twin0", "twin1"}
    assert bench.reasons_of(QueueBlocked)[-1].cause == "loading"
    bench.late = False
    bench.settle()
    assert len(bench.loads) == 1

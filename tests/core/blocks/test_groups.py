"""Groups of layers: a table and a window each, bundles of pages out of one pool, and hits
that all of them have.
"""

from collections.abc import Iterator
from random import Random

import hypothesis.strategies as st
import pytest
from attrs import evolve
from hypothesis import given

from minfer.blocks.keys import block_keys, group_key
from minfer.blocks.ownership import Blocks, Transaction
from minfer.blocks.pool import Pool
from minfer.blocks.prefix import NONE, ROOT, PrefixIndex, bundles, flattened
from minfer.engine import step
from minfer.lifecycle.committed import committed
from minfer.planning.prefix_hit import find_hit
from minfer.records.config import CacheGroup, EngineConfig
from minfer.records.messages import (
    Admitted,
    Cancel,
    Event,
    Executed,
    Submit,
    WindowMissed,
)
from minfer.records.request import Request
from minfer.records.state import EngineState, initial
from minfer.testing.kit import GROUPS
from minfer.values.pmap import Map
from tests.circles import seeds
from tests.core.test_engine import VOCAB, Bench, ask
from tests.core.world import World, run_swarm, several_groups, tiny_config

SIZE = 4
CONFIG = EngineConfig(
    num_blocks=80,
    block_size=SIZE,
    max_model_len=128,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    vocab_size=VOCAB,
    groups=(CacheGroup(), CacheGroup(window=6, pages=2)),
)
# Gemma 3 4B: 5 full layers; 29 sliding ones are six pages of as many layers each.
GEMMA = EngineConfig(
    num_blocks=8000,
    block_size=64,
    max_model_len=40_000,
    max_num_seqs=2,
    max_num_batched_tokens=2048,
    groups=(CacheGroup(window=1024, pages=6), CacheGroup()),
)


def held(state: EngineState) -> int:
    """Pages that running sequences hold."""
    blocks = state.blocks
    return blocks.pool.total - blocks.available


# --- hits -------------------------------------------------------------------------------

KEYS = block_keys(b"", tuple(range(12 * SIZE)), SIZE)


def index(cached: set[tuple[int, int]]) -> PrefixIndex:
    """An index with these blocks: (group, block)."""
    pages = iter(range(1000))
    nodes = {
        group_key(KEYS[block], g): ((next(pages),), ROOT, 0, 0, NONE)
        for g, block in cached
    }
    return PrefixIndex(nodes=Map(nodes))


def serves(groups: tuple[CacheGroup, ...], cached: set[tuple[int, int]], p: int) -> bool:
    """Whether each group has all that a query at position `p` reads before it: recurrent
    layers read the state of just that position.
    """
    return all(
        (g, p // SIZE - 1) in cached or not p
        if group.state
        else all(
            (g, position // SIZE) in cached
            for position in range(p)
            if position < group.sink_tokens
            or not group.window
            or position > p - group.window
        )
        for g, group in enumerate(groups)
    )


@given(
    st.sampled_from(GROUPS),
    st.integers(0, 12),
    st.sets(st.tuples(st.integers(0, 2), st.integers(0, 11)), max_size=8),
    st.integers(0, 12),
)
def test_a_hit_is_the_longest_that_serves_all_groups(
    groups: tuple[CacheGroup, ...],
    end: int,
    missing: set[tuple[int, int]],
    whole: int,
) -> None:
    """By brute force over all positions. Chains without a window have no gaps."""
    chain = next((g for g, group in enumerate(groups) if not group.window), None)
    cached = {
        (g, block)
        for g in range(len(groups))
        for block in range(12)
        if (block < whole if g == chain else (g, block) not in missing)
    }
    config = evolve(CONFIG, groups=groups)
    found = find_hit(config, index(cached), KEYS, end)
    right = [p for p in range(end + 1) if serves(groups, cached, p * SIZE)]
    assert found.blocks == max(right)
    of_blocks = tuple(group for group in groups if not group.state)
    assert found.shared == max(
        p for p in range(end + 1) if serves(of_blocks, cached, p * SIZE)
    )
    full = [g for g, group in enumerate(of_blocks) if not group.window]
    assert found.cached == (min(end, whole) if full else end)
    shortened = bool(full) and found.shared < found.cached
    assert (found.missed is not None) == shortened
    if found.missed is not None:
        assert (found.missed, found.shared) not in cached, "that block ended the hit"


def test_a_block_that_a_window_lost_is_a_reason() -> None:
    """It was released first, so that it is evicted before the chain of all layers."""
    config = evolve(CONFIG, num_blocks=21)
    bench = Bench(config)
    bench.give(Submit(ask("a", prompt=tuple(range(24)), max_tokens=1)))
    bench.drain()
    bench.give(Submit(ask("b", prompt=(9,) * 9, max_tokens=1)))
    bench.drain()
    assert not bench.reasons_of(WindowMissed)
    bench.give(Submit(ask("c", prompt=(*range(12), 7), max_tokens=1)))
    (lost,) = bench.reasons_of(WindowMissed)
    assert lost == WindowMissed("c", 0, group=1, block=0, cached=3)
    assert bench.reasons_of(Admitted)[-1].hit == 0
    bench.drain()


# --- bundles ----------------------------------------------------------------------------


def test_pages_of_a_block_are_evicted_together() -> None:
    change = Transaction(Blocks(Pool(7)))
    taken = change.take(6)
    assert taken is not None
    for key, pages in zip(KEYS, bundles(taken.pages, 3), strict=False):
        assert change.prefix.publish_alone(group_key(key, 1), pages)
    assert (change.prefix.live, change.available) == (6, 1)
    for key in KEYS[:2]:
        change.prefix.release(group_key(key, 1))
    assert (change.prefix.live, change.available) == (0, 7)
    again = change.take(2)
    assert again is not None
    assert again.evicted.pages == (0, 1, 2)
    assert again.evicted.keys == (group_key(KEYS[0], 1),)
    assert (change.available, change.pool.free) == (5, 2)


def test_bundles_and_pages() -> None:
    assert bundles((1, 2, 3, 4), 2) == [(1, 2), (3, 4)]
    assert bundles((1, 2), 1) == [(1,), (2,)]
    assert bundles((), 3) == []
    assert flattened([(1, 2), (), (3,)]) == (1, 2, 3)
    with pytest.raises(ValueError, match="shorter"):
        bundles((1, 2, 3), 2)


def test_a_fork_copies_the_pages_of_all_groups() -> None:
    bench = Bench(CONFIG)
    bench.give(Submit(ask("a", 11, 5, n=2)))
    bench.turn()
    copies = bench.plans[-1].copies
    assert [copy.count for copy in copies] == [2, 2, 2]
    tables = bench.plans[-1].opens[-1].tables
    assert [copy.target for copy in copies] == [tables[0][2], *tables[1][4:6]]
    bench.drain()
    assert bench.out["a", 1] == bench.right(ask("a", 11, 5, n=2), 1)


@pytest.mark.parametrize("groups", GROUPS)
def test_whoever_leaves_gives_back_all_pages(groups: tuple[CacheGroup, ...]) -> None:
    bench = Bench(evolve(CONFIG, groups=groups, depth=2))
    bench.give(Submit(ask("a", 30, 20, n=2)), Submit(ask("b", 9, 9)))
    for _ in range(5):
        bench.turn()
    bench.turn(Cancel("a"))
    bench.drain()
    assert bench.state.blocks.available == CONFIG.num_blocks
    assert bench.out["b", 0] == bench.right(ask("b", 9, 9))


# --- memory -----------------------------------------------------------------------------


def served(config: EngineConfig, request: Request) -> Iterator[EngineState]:
    """The states after each turn of an engine that serves one request."""
    state = initial(config)
    events: tuple[Event, ...] = (Submit(request),)
    while True:
        state = step(config, state, events).state
        if not state.requests:
            return
        yield state
        plan = state.inflight[0]
        events = (
            Executed(plan.step, tuple((1,) * most for most in plan.max_sampled_tokens)),
        )


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_long_prompt_holds_a_quarter_of_full_attention(depth: int) -> None:
    """32k tokens in chunks of 2,048, as Gemma 3 4B has them, and 150 more."""
    prompt, pages = 32_768, 7
    config = evolve(GEMMA, depth=depth)
    prefill, decode = list[float](), list[float]()
    request = Request(id="a", prompt=(1,) * prompt, max_tokens=150)
    for state in served(config, request):
        full = pages * -(-state.running.known[0] // 64)
        done = committed(config, state, 0) >= prompt
        (decode if done else prefill).append(held(state) / full)
    assert len(prefill) >= prompt // 2048
    assert len(decode) > 140
    assert max(prefill) <= 0.24
    assert max(decode) <= 0.18


def test_a_window_alone_gives_back_too() -> None:
    config = evolve(GEMMA, groups=(CacheGroup(window=4096),), depth=2)
    request = Request(id="a", prompt=(1,) * 32_768, max_tokens=2)
    most = max(held(state) for state in served(config, request))
    assert most == (4096 + 2048 + 512) // 64


@pytest.mark.parametrize("groups", GROUPS[2:])
def test_the_smallest_pool_serves_the_longest_request(
    groups: tuple[CacheGroup, ...],
) -> None:
    config = evolve(CONFIG, groups=groups, max_model_len=32, depth=2)
    least = config.most_pages(8)
    for pages, served in ((least, True), (least - 1, False)):
        w = World(evolve(config, num_blocks=pages), Random(1))
        w.submit(Request(id="a", prompt=tuple(range(20)), max_tokens=12))
        w.submit(Request(id="b", prompt=tuple(range(20)), max_tokens=12))
        w.drain()
        assert (w.ended["a", 0].reason == "length") is served


@pytest.mark.long
@seeds(30, 400)
def test_swarms_with_several_groups(seeds: range) -> None:
    worlds = preempted = missed = 0
    for seed in seeds:
        rng = Random(f"groups {seed}")
        if len(several_groups(tiny_config(Random(seed)), rng).groups) > 1:
            worlds += 1
            world = run_swarm(seed, 40)
            preempted += world.preempted
            missed += world.paths["hit shortened by a window"]
    assert worlds > len(seeds) / 5
    assert preempted > len(seeds) / 8
    assert missed

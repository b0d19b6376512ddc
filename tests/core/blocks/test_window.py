"""Sliding windows: blocks that no query reads any more are given back, and hits need the
rest.
"""

from random import Random

import pytest

from minfer.blocks.keys import block_keys
from minfer.blocks.prefix import NONE, ROOT, PrefixIndex
from minfer.blocks.window import lookup_window, outside
from minfer.engine import step
from minfer.records.config import CacheGroup, EngineConfig
from minfer.records.messages import Admitted, Submit
from minfer.records.request import Request
from minfer.values.pmap import Map
from tests.circles import seeds
from tests.core.world import VOCAB, World, run_swarm, tiny_config

CONFIG = EngineConfig(
    num_blocks=40,
    block_size=4,
    max_model_len=128,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    vocab_size=VOCAB,
    groups=(CacheGroup(10),),
    depth=2,
)


def world(config: EngineConfig = CONFIG) -> World:
    return World(config, Random(0))


def ask(name: str, length: int, max_tokens: int = 60, n: int = 1) -> Request:
    prompt = tuple(i % VOCAB for i in range(length))
    return Request(id=name, prompt=prompt, max_tokens=max_tokens, n=n)


def test_what_is_outside() -> None:
    for position in range(60):
        low = outside(position, 10, 4)
        first = max(0, position - 9)  # the first key that a query at `position` reads
        assert low * 4 <= first < low * 4 + 4
    assert outside(1000, 0, 4) == 0


def test_a_long_output_keeps_a_window_of_blocks() -> None:
    w = world()
    w.submit(ask("r", 9))
    most = 0
    while not w.ended:
        w.turn()
        blocks = w.state.blocks
        most = max(most, blocks.pool.total - blocks.available)
    # The window of 10 tokens touches up to 4 blocks; the table grows a block early, and
    # two steps in flight are a block behind at most.
    assert most <= 4 + 1 + 1
    assert 2 * most < 69 // 4
    w.drain()


def test_a_long_prompt_gives_back_as_its_chunks_are_done() -> None:
    """It takes blocks chunk by chunk: 3 of the window, and 5 of a chunk and a quarter."""
    w = world()
    w.submit(ask("r", 100, max_tokens=4))
    used = []
    while not w.ended:
        w.turn()
        used.append(w.state.blocks.pool.total - w.state.blocks.available)
    assert max(used) == 8
    assert used[-2] <= 6
    w.drain()


def test_a_prefix_is_a_hit_when_its_last_window_is_there() -> None:
    w = world()
    w.submit(ask("a", 64, max_tokens=2))
    w.drain()
    turn = step(w.config, w.state, (Submit(ask("b", 64, max_tokens=2)),))
    (got,) = [r for r in turn.reasons if isinstance(r, Admitted)]
    assert got.hit == 60
    low = outside(60, 10, 4)
    chain, table = turn.state.running.chains[0], turn.state.running.tables[0][0]
    assert (chain.low, chain.sealed) == ((low,), (15,))
    held = w.state.blocks.pool.total - turn.state.blocks.available
    assert (
        held <= 16 - low + 1
    )  # the table grows early; what is behind the window was not taken hold of
    assert -1 not in table[low:]


def test_hits_end_where_the_window_has_a_gap() -> None:
    keys = block_keys(b"", tuple(range(40)), 4)
    cached = dict(zip(keys, range(10), strict=True))

    def hit(*missing: int) -> int:
        there = {
            key: ((block,), ROOT, 0, 0, NONE)
            for key, block in cached.items()
            if block not in missing
        }
        return lookup_window(PrefixIndex(nodes=Map(there)), keys, 10, 10, 4)

    assert hit() == 10
    assert hit(0, 1, 2, 6) == 10  # position 40 reads from 31 on: blocks 7, 8 and 9
    assert hit(7) == 7  # position 28 reads from 19 on: blocks 4, 5 and 6
    assert hit(9) == 9
    assert hit(7, 5) == 5
    assert hit(7, 4) == 4
    assert hit(7, 4, 1) == 1
    assert hit(*range(10)) == 0


def test_forks_share_the_window_and_not_what_is_behind_it() -> None:
    w = world()
    w.submit(ask("r", 50, n=3, max_tokens=30))
    w.drain()  # the oracle compares tokens
    assert len(w.ended) == 3


@pytest.mark.long
@seeds(40, 400)
def test_swarms_with_windows(seeds: range) -> None:
    """Enough worlds with a window, preemptions among them."""
    worlds = preempted = 0
    for seed in seeds:
        if tiny_config(Random(seed)).by_chunk:
            worlds += 1
            preempted += run_swarm(seed, 30).preempted
    assert worlds > len(seeds) / 5
    assert preempted > len(seeds) / 8

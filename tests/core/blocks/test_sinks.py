"""Sink tokens: the first blocks of a sequence stay while its window moves on, and hits
need them.
"""

from itertools import combinations
from random import Random

import pytest
from attrs import evolve

from minfer.blocks.keys import block_keys
from minfer.blocks.prefix import NONE, ROOT, PrefixIndex
from minfer.blocks.window import outside, unreleased
from minfer.engine import step
from minfer.planning.prefix_hit import find_hit
from minfer.records.config import CacheGroup, EngineConfig
from minfer.records.messages import Admitted, Event, Executed, Submit
from minfer.records.request import Request
from minfer.records.state import initial
from minfer.values.checks import ConfigError
from minfer.values.pmap import Map
from tests.circles import long
from tests.core.blocks.test_groups import held
from tests.core.blocks.test_window import ask
from tests.core.world import VOCAB, World

SIZE = 4
CONFIG = EngineConfig(
    num_blocks=40,
    block_size=SIZE,
    max_model_len=128,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    vocab_size=VOCAB,
    groups=(CacheGroup(10, sink_tokens=5),),
)


@pytest.mark.parametrize(
    ("window", "sinks", "named"), [(0, 1, "at most window"), (4, 5, "at most window")]
)
def test_sinks_without_room_in_a_window(window: int, sinks: int, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        CacheGroup(window, sink_tokens=sinks)


def test_what_is_kept_has_a_gap_in_the_middle() -> None:
    blocks = range(10)
    assert unreleased(blocks, 0, 10, 6, 2) == (0, 1, 6, 7, 8, 9)
    assert unreleased(blocks, 1, 8, 6, 2) == (1, 6, 7)
    assert unreleased(blocks, 3, 8, 6, 2) == (6, 7)
    assert unreleased(blocks, 0, 10, 1, 2) == tuple(blocks)
    assert unreleased(blocks, 0, 1, 6, 2) == (0,)
    assert unreleased(blocks, 2, 10, 6, 0) == (6, 7, 8, 9)


def test_the_first_blocks_of_a_long_output_stay() -> None:
    w, most = World(CONFIG, Random(0)), 0
    w.submit(ask("r", 9, 100))
    while not w.ended:
        w.turn()
        run, done = w.state.running, len(w.state.running) > 0
        most = max(most, held(w.state))
        if done and run.chains[0].low[0] > 2:
            assert run.chains[0].sealed[0] >= 2
            table = run.tables[0][0]
            pool = w.state.blocks.pool
            assert not {*table[:2]} & {*pool.spare}
    # two sink blocks, four of the window, and what grows early and leaves late
    assert most <= 2 + 4 + 2
    w.drain()


def test_a_prefix_is_a_hit_with_its_sinks_and_its_last_window() -> None:
    w = World(CONFIG, Random(0))
    w.submit(ask("a", 64, 2))
    w.drain()
    turn = step(w.config, w.state, (Submit(ask("b", 64, 2)),))
    (got,) = [r for r in turn.reasons if isinstance(r, Admitted)]
    assert got.hit == 60
    low = outside(60, 10, SIZE)
    chain, table = turn.state.running.chains[0], turn.state.running.tables[0][0]
    assert (chain.low, chain.sealed) == ((low,), (15,))
    assert -1 not in (*table[:2], *table[low:])
    assert {*table[2:low]} == {-1}


def test_a_hit_ends_where_a_sink_block_is_gone() -> None:
    """By brute force: of ten blocks, each subset of four is missing."""
    keys = block_keys(b"", tuple(range(10 * SIZE)), SIZE)
    group = CONFIG.groups[0]
    for missing in combinations(range(10), 4):
        there = {
            key: ((block,), ROOT, 0, 0, NONE)
            for block, key in enumerate(keys)
            if block not in missing
        }
        right = [
            hit
            for hit in range(11)
            if not any(
                position // SIZE in missing
                for position in range(hit * SIZE)
                if position < group.sink_tokens or position > hit * SIZE - group.window
            )
        ]
        found = find_hit(CONFIG, PrefixIndex(nodes=Map(there)), keys, 10)
        assert found.blocks == max(right)


def test_twins_of_a_sink_block_stay_private_and_answers_are_right() -> None:
    """Both compute the same prompt in the same steps: one publishes it first."""
    w = World(evolve(CONFIG, depth=1, max_num_batched_tokens=64), Random(0))
    w.submit(ask("a", 30, 60))
    w.submit(ask("b", 30, 60))
    sealed = set[int]()
    while not w.ended:
        w.turn()
        sealed |= {chain.sealed[0] for chain in w.state.running.chains}
    assert 0 in sealed, "no twin"
    w.drain()  # the oracle compares tokens


def served(config: EngineConfig, request: Request) -> tuple[int, int]:
    """The most pages that are held while one request is served, and its tokens."""
    state, most, tokens = initial(config), 0, 0
    events: tuple[Event, ...] = (Submit(request),)
    while True:
        state = step(config, state, events).state
        most = max(most, held(state))
        if not state.requests:
            return most, tokens
        plan = state.inflight[0]
        tokens += sum(plan.max_sampled_tokens)
        events = (
            Executed(plan.step, tuple((1,) * one for one in plan.max_sampled_tokens)),
        )


LENGTHS = [(200, 1_800), *long([(2_000, 98_000)])]


@pytest.mark.parametrize(("prompt", "output"), LENGTHS)
def test_memory_is_flat_however_long_the_output(prompt: int, output: int) -> None:
    size, window, sinks, budget = 16, 256, 20, 64
    config = evolve(
        CONFIG,
        num_blocks=40,
        block_size=size,
        max_model_len=prompt + output + 1,
        max_num_batched_tokens=budget,
        groups=(CacheGroup(window, sink_tokens=sinks),),
        depth=2,
    )
    request = Request(id="a", prompt=(1,) * prompt, max_tokens=output)
    most, tokens = served(config, request)
    assert tokens == output
    ahead = budget * 5 // 4  # of a prompt, with two steps in flight
    assert most <= -(-sinks // size) + -(-window // size) + -(-ahead // size) + 1

"""When full blocks get a name, and whose stay private."""

from attrs import evolve

from minfer.blocks.ownership import Transaction
from minfer.blocks.window import outside
from minfer.lifecycle.committed import committed
from minfer.lifecycle.publish import (
    _publish_window,
    compute_keys,
    publish_blocks,
    release_if_short,
    release_windows,
    window_blocks_coming,
)
from minfer.records.config import CacheGroup
from minfer.records.messages import Cancel, Submit
from minfer.records.request import PromptOnly
from tests.core.test_engine import CONFIG, Bench, ask


def test_prompts_publish_as_their_chunks_are_done_and_outputs_as_blocks_fill() -> None:
    bench = Bench()
    bench.give(Submit(ask("a", 20, 9)))
    sealed = []
    while bench.state.requests:
        sealed.append(
            (bench.state.running.known[0], bench.state.running.chains[0].sealed[0])
        )
        bench.turn()
    assert sealed[:2] == [(20, 0), (20, 4)]
    assert dict(sealed[2:]) == {21: 5, 22: 5, 23: 5, 24: 5, 25: 6, 26: 6, 27: 6, 28: 6}
    keys = bench.state.blocks.prefix.nodes
    assert len(keys) == 7, "the last full block is published on the way out"


def test_what_a_sequence_does_not_fill_it_has_not_published_and_twins_stay_private() -> (
    None
):
    """Two that compute the same at the same time: the second's blocks are its own until
    it ends.
    """
    bench = Bench()
    prompt = tuple(range(8))
    bench.give(
        Submit(ask("a", prompt=prompt, max_tokens=9)),
        Submit(ask("b", prompt=prompt, max_tokens=9)),
    )
    bench.turn()
    first, second = bench.state.running.chains
    assert (first.sealed, second.sealed) == ((2,), (0,))
    assert bench.state.blocks.live == 2
    bench.turn(Cancel("a"))
    assert bench.state.blocks.live == 0, "the second does not stand on them"
    bench.drain()
    assert bench.state.blocks.available == CONFIG.num_blocks


def test_a_window_lets_go_of_all_that_is_outside_of_what_is_computed() -> None:
    """Not only of what is outside of the last full block."""
    config = evolve(CONFIG, groups=(CacheGroup(6),), max_num_batched_tokens=11)
    bench = Bench(config)
    bench.give(Submit(ask("a", 30, 20)))
    lows = list[int]()
    for _ in range(3):
        bench.turn()
        (chain,) = bench.state.running.chains
        done = committed(config, bench.state, 0)
        assert chain.low == (outside(done, 6, 4),)
        lows += chain.low
    assert lows == [1, 4, 6]


def test_fewer_keys_than_there_are_leave_keys_and_tail_as_they_are() -> None:
    bench = Bench()
    bench.give(Submit(ask("a", 8, 9)))
    bench.turn()
    run = bench.state.running
    (chain,), fresh = run.chains, (*range(6),)
    run = evolve(run, tails=((),), fresh=(fresh,))
    assert len(chain.keys) == 2
    for upto in (1, 2):
        found = compute_keys(bench.config, run, 0, upto)
        assert found == (chain.keys, chain.chunks, fresh)


def test_a_group_that_lags_behind_another_is_published_without_a_new_block() -> None:
    """Its blocks had twins, which are evicted by now."""
    bench = Bench(evolve(CONFIG, groups=(CacheGroup(), CacheGroup(8)), num_blocks=64))
    bench.give(Submit(ask("a", 8, 9)))
    (chain,) = bench.state.running.chains
    lagging = evolve(bench.state.running, chains=(evolve(chain, sealed=(0, 2)),))
    state = publish_blocks(bench.config, evolve(bench.state, running=lagging), {0: 2})
    assert state.running.chains[0].sealed == (2, 2)


def test_blocks_are_coming_while_steps_in_flight_move_a_window_and_it_gives_any() -> None:
    """A prompt of 40 is computed in chunks of 16, behind a window of 8 tokens."""
    config = evolve(CONFIG, groups=(CacheGroup(8),))
    bench = Bench(config)
    bench.give(Submit(ask("a", 40, 3)))
    landed = evolve(bench.state, inflight=())
    assert window_blocks_coming(config, bench.state)
    assert not window_blocks_coming(config, landed)


def test_no_block_is_coming_from_sinks_nor_before_a_window_is_full() -> None:
    for sinks, length, more in (
        (0, 11, True),
        (0, 10, False),
        (8, 19, True),
        (8, 18, False),
    ):
        group = CacheGroup(8, sink_tokens=sinks)
        config = evolve(CONFIG, groups=(group,), max_num_batched_tokens=32)
        bench = Bench(config)
        bench.give(Submit(ask("a", length, 3)))
        assert window_blocks_coming(config, bench.state) == more, (sinks, length)


def test_what_left_a_window_counts_as_published_if_all_sinks_are() -> None:
    """Of four blocks, the first has sinks, and two are behind the window."""
    group = CacheGroup(8, sink_tokens=4)
    bench = Bench(evolve(CONFIG, groups=(group,)))
    bench.give(Submit(ask("a", 16, 9)))
    run, change = bench.state.running, Transaction(bench.state.blocks)
    ((table,),), (chain,) = run.tables, run.chains
    for sealed, then in ((0, 0), (1, 3)):
        chain = evolve(chain, sealed=(sealed,))
        about = (change, chain, chain.keys, 0, group, table)
        assert _publish_window(*about, count=sealed, num_outside=3, sinks=1) == (
            then,
            3,
        )


def test_who_may_begin_anew_publishes_nothing_when_blocks_are_short() -> None:
    for pooling, published in (("mean", 0), ("", 4)):
        bench = Bench(evolve(CONFIG, groups=(CacheGroup(8),)))
        bench.give(Submit(ask("a", 40, 0, prompt_only=PromptOnly(pooling))))
        state = evolve(bench.state, inflight=())
        after = release_windows(bench.config, state)
        assert len(after.blocks.prefix.nodes) == published


def test_windows_are_released_where_pages_are_short_and_only_there() -> None:
    groups = (CacheGroup(4, pages=3), CacheGroup())
    for window, released in ((groups, 3), (groups[1:], 0)):
        bench = Bench(evolve(CONFIG, groups=window))
        bench.turn(Submit(ask("a", 6, 11)))
        bench.turn()
        bench.turn()
        state = bench.state
        available = state.blocks.available
        assert release_if_short(bench.config, state, available) is state
        after = release_if_short(bench.config, state, available + 1)
        assert after.blocks.available == available + released
        assert (after is state) == (not released)

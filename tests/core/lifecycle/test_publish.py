"""When full blocks get a name, and whose stay private."""

from attrs import evolve

from minfer.blocks.window import outside
from minfer.lifecycle.committed import committed
from minfer.records.config import CacheGroup
from minfer.records.messages import Cancel, Submit
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

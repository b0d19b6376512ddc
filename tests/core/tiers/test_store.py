"""Which blocks are stored together, and which wait."""

from attrs import evolve

from minfer.blocks.keys import TAIL
from minfer.records.messages import Submit
from tests.core.test_engine import ask
from tests.core.tiers.hosted import Hosted
from tests.core.tiers.test_keyed import BOTH, Keyed
from tests.core.tiers.test_tiers import LONG, keys_of


def test_as_many_blocks_wait_as_the_pool_has() -> None:
    config = evolve(BOTH, max_num_seqs=8, max_num_batched_tokens=32)
    bench = Keyed(evolve(config, host=evolve(config.host, storing=1)), storing=1)
    bench.late = True
    every = [ask(f"{i}", prompt=(40 + i,) * 4, max_tokens=1) for i in range(8)]
    bench.turn(*map(Submit, every))
    while bench.state.requests:
        bench.turn()
    tiers = bench.state.tiers
    assert (len(tiers.unstored), len(tiers.unsaved)) == (7, 7)  # and one is on its way


def test_consecutive_blocks_are_one_run() -> None:
    bench = Keyed(evolve(BOTH, max_num_batched_tokens=32))
    bench.late = True
    other = ask("other", prompt=(40,) * 9, max_tokens=1)
    bench.turn(Submit(LONG), Submit(other))
    while bench.state.requests:
        bench.turn()
    runs = [path.keys for one in bench.state.tiers.transfers for path in one.paths]
    assert runs == [keys_of(LONG), keys_of(other)] * 2  # to each tier


def test_no_more_is_stored_than_the_host_has_room_for() -> None:
    bench = Hosted(pages=2)
    bench.serve(LONG)
    assert bench.stores[0].sources == (0, 1)
    host = bench.state.tiers.host
    assert host is not None
    assert {*host.prefix.nodes} == {*keys_of(LONG, 2)}


def test_a_run_without_room_behind_its_parent_holds_nothing() -> None:
    """Host memory has the first two blocks, and another one that can be evicted."""
    bench = Hosted(pages=3)
    bench.serve(evolve(LONG, id="begin", prompt=LONG.prompt[:9], max_tokens=1))
    bench.serve(ask("x", prompt=(40,) * 5, max_tokens=1))
    longer = evolve(LONG, id="longer", prompt=LONG.prompt[:17], max_tokens=1)
    other = ask("y", prompt=(41,) * 5, max_tokens=1)
    bench.turn(Submit(longer), Submit(other))
    bench.settle()
    host = bench.state.tiers.host
    assert host is not None
    assert {*host.prefix.nodes} == {*keys_of(longer, 2), *keys_of(other, 1)}
    assert bench.state.blocks.available == bench.config.num_blocks


def test_a_key_that_begins_as_one_of_a_partial_block_is_of_a_whole_one() -> None:
    prompts = ((*divmod(i, 40), 1, 2, 3) for i in range(1600))
    prompt = next(one for one in prompts if keys_of(ask("a", prompt=one))[0][:1] == TAIL)
    bench = Keyed()
    bench.serve(ask("a", prompt=prompt, max_tokens=1))
    assert len(bench.saves) == 1

"""The end of a transfer."""

import pytest
from attrs import evolve

from minfer.blocks.keys import Key
from minfer.records.messages import Lost, Moved, StoreBlocks, Submit
from minfer.records.request import SamplingParams
from minfer.records.state import EngineState
from minfer.records.tiers import RecentKeys, TransferKind
from minfer.tiers.finish import finish_transfer
from minfer.values.queue import Queue
from tests.core.tiers.hosted import HOST, Hosted
from tests.core.tiers.test_external import ALONE, BOTH, EXTERNAL, External
from tests.core.tiers.test_tiers import AGAIN, LONG, keys_of


def test_pages_of_blocks_that_were_computed_meanwhile_are_free() -> None:
    bench = External(evolve(ALONE, num_blocks=12))
    bench.serve(LONG)
    bench.push_out()
    bench.late = True
    scored = SamplingParams(prompt_logprobs=0)
    bench.turn(Submit(AGAIN), Submit(evolve(LONG, id="anew", sampling=scored)))
    while "anew" in bench.state.requests:
        bench.turn()
    assert bench.fetches
    bench.late = False
    bench.settle()
    assert bench.out["again", 0] == bench.out["anew", 0] == bench.right(LONG)
    assert bench.state.blocks.available == 12
    assert bench.state.blocks.prefix.cached + bench.state.blocks.free == 12


def waiting(state: EngineState) -> tuple[int, int]:
    """How many blocks wait to be stored in host memory, and by key."""
    return len(state.tiers.host_queue), len(state.tiers.external_queue)


@pytest.mark.parametrize("external", [True, False])
@pytest.mark.parametrize("error", ["", "full"])
def test_a_store_that_fails_empties_the_queue_behind_it_and_no_other(
    error: str, external: bool
) -> None:
    config = evolve(
        BOTH, external_store=evolve(EXTERNAL, storing=1), host=evolve(HOST, storing=1)
    )
    bench = External(config)
    bench.late = True
    bench.turn(Submit(LONG))
    while bench.state.requests:
        bench.turn()
    before = waiting(bench.state)
    assert min(before) > 1
    kinds = [isinstance(one, StoreBlocks) for one in bench.oracle.moves]
    bench.give(bench.oracle.finish_move(kinds.index(external), error))
    left = [*before]
    left[external] = 0 if error else before[external] - 1  # the next is on its way
    assert waiting(bench.state) == tuple(left)


@pytest.mark.parametrize("external", [True, False])
@pytest.mark.parametrize("end", [Moved(9), Lost(9, "full")])
def test_a_load_leaves_the_queues_as_they_are(end: Moved | Lost, external: bool) -> None:
    bench = External() if external else Hosted()
    bench.serve(LONG)
    bench.push_out()
    bench.late = True
    bench.turn(Submit(AGAIN))
    [load] = bench.state.tiers.transfers
    kinds = TransferKind.LOAD_FROM_HOST, TransferKind.FETCH_FROM_EXTERNAL
    assert load.kind is kinds[external]
    queue = Queue[Key]().extended(keys_of(LONG), 9)
    tiers = evolve(bench.state.tiers, host_queue=queue, external_queue=queue)
    state = evolve(bench.state, tiers=tiers)
    after = finish_transfer(bench.config, state, evolve(end, number=load.number))
    assert not after.state.tiers.transfers
    assert waiting(after.state) == (4, 4)


@pytest.mark.parametrize("end", [Moved(9), Lost(9, "full")])
@pytest.mark.parametrize("wanted", range(5))
def test_what_ends_in_host_memory_has_nothing_sent_to_another_engine(
    wanted: int, end: Moved | Lost
) -> None:
    """What a request wants sent was queued when it came: it waits, or it was lost."""
    bench = External(BOTH, push_only=True)
    bench.late = True
    bench.turn(Submit(LONG))
    while not bench.state.tiers.transfers:
        bench.turn()
    [store, *_] = bench.state.tiers.transfers
    assert store.kind is TransferKind.STORE_TO_HOST
    known = RecentKeys().add(keys_of(LONG, wanted), 100)
    state = evolve(bench.state, tiers=evolve(bench.state.tiers, push_keys=known))
    after = finish_transfer(bench.config, state, evolve(end, number=store.number))
    assert not after.state.tiers.external_queue
    assert after.state.tiers.push_keys == known

"""What becomes of the blocks of those who leave, at once or behind a fence."""

from attrs import evolve

from minfer.blocks.keys import block_keys, group_key, is_tail, tail_keys
from minfer.blocks.ownership import Transaction
from minfer.blocks.prefix import ROOT, lookup, pages_of
from minfer.lifecycle.retire import _held_states
from minfer.records.config import CacheGroup
from minfer.records.messages import Admitted, Cancel, Submit
from minfer.records.request import Continuation
from minfer.records.sequence import RowStates
from minfer.records.state import Fence, initial
from tests.core.lifecycle.test_preempt import only
from tests.core.test_engine import CONFIG, Bench, ask
from tests.core.tiers.test_states_in_tiers import STATES


def test_who_leaves_gives_back_all_its_blocks_and_what_is_full_stays_cached() -> None:
    bench = Bench()
    request = ask("a", 9, 5)
    bench.give(Submit(request))
    for _ in range(3):
        bench.turn()
    keys = only(bench).seqs[0].keys
    bench.turn(Cancel("a"))
    assert bench.state.blocks.available == CONFIG.num_blocks
    assert bench.state.blocks.live == 0
    assert lookup(bench.state.blocks.prefix, keys) == 2
    assert bench.state.free_rows == (3, 2, 1, 0)
    assert bench.reasons_of(Admitted)


def test_with_plans_in_flight_the_blocks_wait_for_the_last_of_them() -> None:
    bench = Bench(evolve(CONFIG, depth=3))
    bench.give(Submit(ask("a", 9, 20)), Submit(ask("bb", 9, 20)))
    bench.turn()
    last = bench.state.inflight[-1].step
    ((table,), _) = bench.state.running.tables
    bench.give(Cancel("a"))
    assert [fence.until for fence in bench.state.fences] == [last]
    (fence,) = bench.state.fences
    assert set(fence.private) <= set(table)
    assert len(set(fence.private)) + 2 == len(table), (
        "two blocks of the prompt were published"
    )
    while bench.state.inflight[0].step <= last:
        assert bench.state.fences == (fence,)
        bench.turn()
    assert not bench.state.fences
    bench.drain()
    assert bench.state.blocks.available == CONFIG.num_blocks


def test_a_failed_step_opens_all_fences() -> None:
    bench = Bench(evolve(CONFIG, depth=3))
    bench.give(Submit(ask("a", 9, 20)), Submit(ask("bb", 9, 20)))
    bench.turn()
    bench.give(Cancel("a"))
    assert isinstance(bench.state.fences[0], Fence)
    bench.give(bench.oracle.fail("boom", halfway=False))
    assert not bench.state.fences
    bench.drain()
    assert bench.out["bb", 0] == bench.right(ask("bb", 9, 20))


def test_the_end_of_a_chain_is_evicted_before_its_beginning_with_a_window_too() -> None:
    bench = Bench(evolve(CONFIG, groups=(CacheGroup(8),), num_blocks=8, max_model_len=32))
    bench.give(Submit(ask("a", 13, 1)))
    bench.turn()
    prefix = bench.state.blocks.prefix
    order = pages_of(prefix, [key for _, key in sorted(prefix.idle.items())])
    assert order == tuple(reversed(bench.plans[0].opens[0].tables[0][:3]))


def test_who_leaves_before_its_prompt_is_computed_leaves_no_tail_of_it() -> None:
    """Of 22 tokens a step computes 16; the last 2 are in a block that is not full."""
    bench, asked = Bench(), ask("a", 22, 1)
    keys = block_keys(asked.root, asked.prompt, 4)
    tails = tail_keys(asked.root, keys, asked.prompt, 4)
    bench.give(Submit(evolve(asked, continuation=Continuation(tail_keys=tails))))
    bench.turn(Cancel("a"))
    bench.drain()
    found = bench.state.blocks.prefix.nodes
    assert set(found) == set(keys[:4])
    assert not any(map(is_tail, found))


def test_a_checkpoint_is_stored_as_its_sequence_leaves_and_another_state_is_not() -> None:
    """Another one was to be stored when it was published."""
    keys = block_keys(b"", tuple(range(8)), 4)
    first, key = (group_key(content, 1) for content in keys)
    for checkpoint, stored in ((ROOT, ()), (key, (key,))):
        change = Transaction(initial(STATES).blocks)
        assert change.prefix.publish_state(ROOT, first, (1, 2), store=False)
        assert change.prefix.publish_state(ROOT, key, (3, 4), store=False)
        states = RowStates(kept=(first, key), checkpoint=checkpoint)
        assert _held_states(change, states) == (key,)
        assert change.prefix.unstored == stored

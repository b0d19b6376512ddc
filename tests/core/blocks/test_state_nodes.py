"""Kept states in the prefix index: children of their blocks, counted, evicted before
them, and dropped.
"""

from random import Random

import pytest

from minfer.blocks.keys import block_keys, group_key
from minfer.blocks.ownership import Blocks, Transaction
from minfer.blocks.pool import Pool
from minfer.blocks.prefix import ROOT, PrefixIndex, bundles, node_of, pages_in

KEYS = block_keys(b"", tuple(range(24)), 4)
STATE = tuple(group_key(key, 1) for key in KEYS)


def opened(pages: int = 20, *, noted: bool = False) -> Transaction:
    """An index with three published blocks, which nothing holds."""
    index = PrefixIndex(state_group=1, unstored=() if noted else None)
    change = Transaction(Blocks(Pool(pages), index))
    taken = change.take(3)
    assert taken is not None
    leaf, _ = change.prefix.publish(ROOT, KEYS[:3], bundles(taken.pages, 1))
    change.prefix.release(leaf)
    return change


def keep(change: Transaction, block: int, *, store: bool = True) -> bool:
    taken = change.take(2)
    assert taken is not None
    key, parent = STATE[block], KEYS[block]
    if change.prefix.publish_state(parent, key, taken.pages, store=store):
        return True
    change.pool.release(taken.pages)
    return False


def test_a_kept_state_is_idle_and_counted() -> None:
    change = opened()
    assert keep(change, 1)
    done = change.done()
    assert (done.prefix.state_pages, done.prefix.cached, done.idle) == (2, 5, 5)
    node = node_of(done.prefix, STATE[1])
    assert node is not None
    assert (node.parent, node.users, node.children) == (KEYS[1], 0, 0)
    assert done.available == 20


def test_it_is_kept_once_and_behind_a_cached_block() -> None:
    change = opened()
    assert keep(change, 1)
    assert not keep(change, 1), "it is kept already"
    assert not keep(change, 3), "its block is not cached"
    assert change.prefix.publish_state(ROOT, STATE[5], (18, 19)), "it has no block"
    assert change.prefix.state_pages == 4


def test_it_is_evicted_before_its_block() -> None:
    change = opened()
    assert keep(change, 2)
    change.prefix.hold(KEYS[2])
    change.prefix.release(KEYS[2])  # the block was used after it
    evicted = change.prefix.evict(1)
    assert evicted.keys[0] == STATE[2]
    assert change.prefix.state_pages == 0
    assert KEYS[2] in change.prefix.nodes
    assert change.prefix.evict(1).keys == (KEYS[2],)


def test_a_block_that_could_be_evicted_waits_for_its_state() -> None:
    change = opened()
    idle = change.done().prefix.idle
    assert [*idle.values()] == [KEYS[2]]
    change = opened()
    assert keep(change, 2)
    assert [*change.done().prefix.idle.values()] == [STATE[2]]


def test_a_block_was_last_used_when_its_dropped_state_was() -> None:
    change = opened()
    taken = change.take(1)
    assert taken is not None
    [other] = block_keys(b"", (1,) * 4, 4)
    leaf, _ = change.prefix.publish(ROOT, (other,), bundles(taken.pages, 1))
    change.prefix.release(leaf)
    assert keep(change, 1)
    change.pool.release(change.prefix.drop_state(STATE[1]))
    assert change.prefix.evict(3).keys == (KEYS[2], other, KEYS[1])


@pytest.mark.parametrize("held", [False, True])
def test_what_is_dropped_leaves_its_block_as_it_was(*, held: bool) -> None:
    change = opened()
    if held:
        change.prefix.hold(KEYS[2])
    before = change.prefix.idlers
    assert keep(change, 2)
    pages = change.prefix.drop_state(STATE[2])
    assert len(pages) == 2
    change.pool.release(pages)
    assert (change.prefix.state_pages, change.prefix.idlers) == (0, before)
    done = change.done().prefix
    assert [*done.idle.values()] == ([] if held else [KEYS[2]])
    node = node_of(done, KEYS[2])
    assert node is not None
    assert (node.users, node.children) == (int(held), 0)


def test_a_held_state_keeps_its_chain() -> None:
    change = opened()
    assert keep(change, 1)
    change.prefix.hold(STATE[1])
    assert change.prefix.live == 4
    assert change.prefix.evict(1).keys == (KEYS[2],)
    assert not change.prefix.can_evict(1)
    change.prefix.release(STATE[1])
    assert change.prefix.can_evict(4)


def test_what_no_tier_is_to_have_is_not_noted() -> None:
    change = opened(noted=True)
    assert keep(change, 1)
    assert keep(change, 2, store=False)
    assert change.done().prefix.unstored == (*KEYS[:3], STATE[1])


@pytest.mark.parametrize("seed", range(20))
def test_counts_hold_whatever_is_kept_dropped_and_evicted(seed: int) -> None:
    rng, blocks = Random(seed), opened(40).done()
    for _ in range(60):
        change = Transaction(blocks)
        kept = [key for key in STATE if key in blocks.prefix.nodes]
        if kept and rng.random() < 0.3:
            change.pool.release(change.prefix.drop_state(rng.choice(kept)))
        elif rng.random() < 0.2 and blocks.idle:
            change.pool.release(change.prefix.evict(1).pages)
        else:
            keep(change, rng.randrange(3))
        blocks = change.done()
        kept = [key for key in STATE if key in blocks.prefix.nodes]
        assert blocks.prefix.state_pages == 2 * len(kept)
        assert blocks.prefix.cached == pages_in(blocks.prefix.nodes.values())
        assert blocks.free + blocks.prefix.cached == 40

"""Blocks against a slow model: sets, and a list in order of use."""

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from minfer.blocks.ownership import NOTHING_EVICTED, Blocks, Transaction, blocks_for
from minfer.blocks.pool import Pool
from minfer.blocks.prefix import ROOT, Evicted, bundles, lookup, pages_of
from tests.core.blocks.test_prefix import KEYS, take


def test_taking_blocks_reports_what_is_evicted() -> None:
    change = Transaction(Blocks(Pool(4)))
    table = take(change, 3)
    assert table is not None
    leaf, _ = change.prefix.publish(ROOT, KEYS[:3], bundles(table, 1))
    change.prefix.release(leaf)
    first, second = change.take(1), change.take(2)
    assert first is not None
    assert second is not None
    assert (first.pages, first.evicted) == ((3,), NOTHING_EVICTED)
    assert second.evicted == Evicted((table[2], table[1]), (KEYS[2], KEYS[1]))
    assert sorted(second.pages) == [table[1], table[2]]
    assert change.take(2) is None


def test_nothing_is_evicted_while_blocks_are_free() -> None:
    change = Transaction(Blocks(Pool(4)))
    table = take(change, 2)
    assert table is not None
    leaf, _ = change.prefix.publish(ROOT, KEYS[:2], bundles(table, 1))
    change.prefix.release(leaf)
    assert take(change, 2) == (2, 3)
    assert lookup(change.prefix, KEYS[:2]) == 2
    assert take(change, 1) == (1,)
    assert lookup(change.prefix, KEYS[:2]) == 1
    assert (change.pool.free, change.available) == (0, 1)


def test_taking_free_blocks_leaves_the_index_unopened() -> None:
    before = Blocks(Pool(4))
    change = Transaction(before)
    change.take(4)
    assert change.done().prefix is before.prefix


def test_blocks_for_a_length_leave_out_the_last_token() -> None:
    assert [blocks_for(tokens, 4) for tokens in (0, 1, 2, 5, 6, 9, 10)] == [
        1,
        1,
        1,
        1,
        2,
        2,
        3,
    ]


@pytest.mark.long
@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 6), st.integers(0, 9)), max_size=60
    )
)
def test_the_pool_against_a_list_in_order_of_use(
    moves: list[tuple[int, int, int]],
) -> None:
    """Single blocks, taken, named, held, let go; the longest unused goes when one is
    needed.
    """
    pool, free, order = Blocks(Pool(6)), 6, list[bytes]()
    named, users = dict[bytes, int](), Counter[bytes]()
    for what, number, _ in moves:
        change, key = Transaction(pool), KEYS[number]
        if what in (0, 1) and key not in named:
            got = take(change, 1)
            if not free and not order:
                assert got is None
                continue
            assert got is not None
            if free:
                free -= 1
            else:
                gone = order.pop(0)
                assert got == (named.pop(gone),)
            assert change.prefix.publish_alone(key, got)
            named[key], users[key] = got[0], 1
        elif what == 2 and key in named:
            change.prefix.hold(key)
            users[key] += 1
            order = [other for other in order if other != key]
        elif users[key]:
            change.prefix.release(key)
            users[key] -= 1
            if not users[key]:
                order.append(key)
        pool = change.done()
        assert pool.available == free + len(order)
        assert pool.live == len(+users)
        assert [key for _, key in sorted(pool.prefix.idle.items())] == order
        assert pages_of(pool.prefix, order) == tuple(named[key] for key in order)

"""Blocks against a slow model: sets, and a list in order of use."""

from collections import Counter
from random import Random

import hypothesis.strategies as st
from attrs import evolve
from hypothesis import given, settings

from minfer.blocks import ROOT, Blocks, Draft, blocks_for, live, lookup
from minfer.tickets import words_of

KEYS = tuple(bytes([i]) for i in range(200))


def test_taking_and_giving_back() -> None:
    draft = Draft(Blocks(200))
    first = draft.take(150)
    assert first == tuple(range(150))
    assert draft.take(51) is None
    assert draft.take(0) == ()
    draft.give(first[:70])
    draft.give(first[70:75])
    draft.give(first[75:])
    pool = draft.done()
    assert pool.available == 200
    again = Draft(pool).take(200)
    assert again is not None
    assert sorted(again) == list(range(200))


def test_published_blocks_are_found_held_and_evicted_leaf_first() -> None:
    draft = Draft(Blocks(4))
    table = draft.take(3)
    assert table is not None
    leaf, twins = draft.publish(ROOT, KEYS[:3], table)
    assert (leaf, twins) == (table[2], ())
    assert draft.available == 1
    draft.release(leaf)
    pool = draft.done()
    assert pool.available == 4
    assert lookup(pool, KEYS[:5]) == 3
    assert lookup(pool, ()) == 0
    assert lookup(pool, KEYS[5:6]) == 0
    draft = Draft(pool)
    assert draft.take(2) is not None  # the free one, and one that is evicted
    assert lookup(draft, KEYS[:3]) == 2, "the end of the chain goes first"
    draft.hold(table[1])
    assert draft.available == 0
    assert draft.take(1) is None
    draft.release(table[1])
    assert draft.take(2) is not None
    assert lookup(draft, KEYS[:3]) == 0


def test_a_twin_stays_private_and_its_holder_stands_on_the_cached_one() -> None:
    draft = Draft(Blocks(8))
    one, two = draft.take(2), draft.take(3)
    assert one is not None
    assert two is not None
    leaf, _ = draft.publish(ROOT, KEYS[:2], one)
    other, twins = draft.publish(ROOT, KEYS[:3], two)
    assert twins == two[:2]
    assert other == two[2]
    draft.give(twins)
    draft.release(leaf)
    assert draft.available == 5, "the second holds the whole chain"
    draft.release(other)
    assert draft.available == 8


def test_the_longest_unused_goes_first() -> None:
    draft = Draft(Blocks(3))
    for key in KEYS[:3]:
        table = draft.take(1)
        assert table is not None
        draft.publish(ROOT, (key,), table)
    for block in (1, 0, 2):
        draft.release(block)
    draft.hold(1)
    draft.release(1)  # used again: now the last to go
    assert draft.take(1) == (0,)
    assert draft.take(1) == (2,)
    assert draft.take(1) == (1,)


def test_a_parent_used_after_its_child_goes_after_what_is_older() -> None:
    draft = Draft(Blocks(3))
    chain = draft.take(2)
    assert chain is not None
    child, _ = draft.publish(ROOT, KEYS[:2], chain)
    draft.release(child)
    lone = draft.take(1)
    assert lone is not None
    draft.publish(ROOT, KEYS[9:10], lone)
    draft.release(lone[0])
    draft.hold(chain[0])
    draft.release(chain[0])
    assert draft.take(1) == (chain[1],)
    assert draft.take(1) == (lone[0],)
    assert draft.take(1) == (chain[0],)


def test_freed_blocks_are_put_by_as_a_run_when_there_are_too_many_at_hand() -> None:
    draft = Draft(Blocks(12, run=4))
    assert draft.take(10) == tuple(range(10))
    draft.give((0, 1, 2))
    draft.give((3,))
    assert draft.spare == (3, 0, 1, 2)
    draft.give((4, 5))
    pool = draft.done()
    assert (pool.spare, dict(pool.freed)) == ((4, 5), {0: (3, 0, 1, 2)})
    draft = Draft(pool)
    assert draft.take(2) == (4, 5), (
        "what is at hand goes first, and runs stay as they are"
    )
    assert (draft.spare, len(draft.freed), draft.free) == ((), 1, 6)
    assert draft.take(3) == (3, 0, 1)
    assert (draft.spare, len(draft.freed)) == ((2,), 0)
    assert draft.take(3) == (2, 10, 11), "then those that were never used"
    assert draft.take(1) is None


def test_nothing_is_evicted_while_blocks_are_free() -> None:
    draft = Draft(Blocks(4))
    table = draft.take(2)
    assert table is not None
    leaf, _ = draft.publish(ROOT, KEYS[:2], table)
    draft.release(leaf)
    assert draft.take(2) == (2, 3)
    assert lookup(draft, KEYS[:2]) == 2
    assert draft.take(1) == (1,)
    assert lookup(draft, KEYS[:2]) == 1
    assert (draft.free, draft.available) == (0, 1)


def test_only_the_first_keys_are_looked_up_and_a_gap_ends_a_hit() -> None:
    draft = Draft(Blocks(8))
    table = draft.take(5)
    assert table is not None
    draft.publish(ROOT, KEYS[:5], table)
    assert [lookup(draft, KEYS[:9], end) for end in (0, 1, 3, 5, 9, None)] == [
        0,
        1,
        3,
        5,
        5,
        5,
    ]
    assert lookup(draft, KEYS[1:2]) == 1
    assert lookup(draft, KEYS[6:9]) == 0


def test_live_is_what_somebody_stands_on() -> None:
    draft = Draft(Blocks(8))
    table = draft.take(3)
    assert table is not None
    leaf, _ = draft.publish(ROOT, KEYS[:3], table)
    assert [live(draft, key) for key in KEYS[:4]] == [True, True, True, False]
    draft.hold(table[1])
    draft.release(leaf)
    assert [live(draft, key) for key in KEYS[:4]] == [True, True, False, False]
    assert (draft.live, draft.available) == (2, 6)


def test_a_branch_keeps_its_stem_and_counts_change_only_up_to_it() -> None:
    draft = Draft(Blocks(8))
    stem = draft.take(2)
    assert stem is not None
    leaf, _ = draft.publish(ROOT, KEYS[:2], stem)
    leaves = []
    for key in KEYS[2:4]:
        twig = draft.take(1)
        assert twig is not None
        draft.hold(stem[1])
        leaves.append(draft.publish(stem[1], (key,), twig)[0])
    draft.release(leaf)
    assert draft.nodes[stem[1]][2:4] == (2, 2), "two users, two children"
    assert draft.nodes[stem[0]][2:4] == (1, 1)
    draft.release(leaves[0])
    assert (draft.nodes[stem[1]][2], draft.live) == (1, 3)
    draft.release(leaves[1])
    assert (draft.nodes[stem[0]][2], draft.live, len(draft.idle)) == (0, 0, 2)
    draft.take(5)
    assert draft.nodes[stem[1]][3] == 1, "one child is gone"
    assert lookup(draft, (*KEYS[:2], KEYS[2])) == 2
    assert lookup(draft, (*KEYS[:2], KEYS[3])) == 3


def test_a_stem_goes_after_what_was_used_before_it() -> None:
    draft = Draft(Blocks(4))
    table = draft.take(4)
    assert table is not None
    leaf, _ = draft.publish(ROOT, KEYS[:4], table)
    draft.release(leaf)
    assert draft.take(3) == (table[3], table[2], table[1])
    assert (len(draft.idle), draft.idle[0]) == (1, table[0])
    assert lookup(draft, KEYS[:1]) == 1
    draft.hold(table[0])
    assert not draft.idle
    assert draft.take(1) is None


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


def test_a_block_named_alone_is_held_and_a_twin_is_not_named() -> None:
    draft = Draft(Blocks(4))
    table = draft.take(2)
    assert table is not None
    assert draft.publish_alone(KEYS[0], table[0])
    assert not draft.publish_alone(KEYS[0], table[1])
    assert (draft.live, draft.available) == (1, 2)
    draft.release(table[0])
    assert (draft.live, draft.available) == (0, 3)
    assert (len(draft.idle), draft.idle[0]) == (1, table[0])


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
    pool, free, order = Blocks(6), 6, list[bytes]()
    named, users = dict[bytes, int](), Counter[bytes]()
    for what, number, _ in moves:
        draft, key = Draft(pool), KEYS[number]
        if what in (0, 1) and key not in named:
            got = draft.take(1)
            if not free and not order:
                assert got is None
                continue
            assert got is not None
            if free:
                free -= 1
            else:
                gone = order.pop(0)
                assert got == (named.pop(gone),)
            assert draft.publish_alone(key, got[0])
            named[key], users[key] = got[0], 1
        elif what == 2 and key in named:
            draft.hold(named[key])
            users[key] += 1
            order = [other for other in order if other != key]
        elif users[key]:
            draft.release(named[key])
            users[key] -= 1
            if not users[key]:
                order.append(key)
        pool = draft.done()
        assert pool.available == free + len(order)
        assert pool.live == len(+users)
        assert [block for _, block in sorted(pool.idle.items())] == [
            named[k] for k in order
        ]


def test_eviction_is_in_order_of_last_use_after_many_uses_of_some() -> None:
    """However far apart the tickets of what is idle are."""
    draft, rng = Draft(Blocks(40)), Random(1)
    uses = dict[int, int]()
    for at in range(40):
        (block,) = draft.take(1) or ()
        draft.publish(ROOT, KEYS[at : at + 1], (block,))
        draft.release(block)
        uses[block] = at
    for use in range(40, 3000):
        block = rng.choice((1, 2, 3)) if use % 500 else rng.randrange(40)
        draft.hold(block)
        draft.release(block)
        uses[block] = use
    pool = draft.done()
    assert pool == evolve(pool, words=words_of(pool.idle)), (
        "the words are those of what is idle"
    )
    order = sorted(uses, key=uses.__getitem__)
    for at in range(0, 40, 8):
        draft = Draft(pool)
        assert draft.take(8) == tuple(order[at : at + 8])
        pool = draft.done()

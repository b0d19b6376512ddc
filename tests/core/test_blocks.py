"""Blocks against a slow model: sets, and a list in order of use."""

from minfer.blocks import ROOT, Blocks, Draft, lookup

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

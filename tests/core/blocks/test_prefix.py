"""The prefix index: what is found, who stands on it, and what goes first."""

from collections import Counter
from random import Random

import pytest
from attrs import define, evolve, field

from minfer.blocks.ownership import Blocks, Transaction
from minfer.blocks.pool import Pool
from minfer.blocks.prefix import (
    ROOT,
    PrefixIndex,
    bundles,
    count_evictable,
    every_node,
    flattened,
    is_live,
    lookup,
    node_of,
    pages_of,
)
from minfer.values.pmap import Map
from minfer.values.tickets import words_of

KEYS = tuple(bytes([i]) for i in range(200))


def take(change: Transaction, count: int) -> tuple[int, ...] | None:
    taken = change.take(count)
    return taken.pages if taken else None


def counts(change: Transaction, key: bytes) -> tuple[int, int]:
    """Users and children of what has this content."""
    node = node_of(change.prefix, key)
    assert node is not None
    return node.users, node.children


def test_published_blocks_are_found_held_and_evicted_leaf_first() -> None:
    change = Transaction(Blocks(Pool(4)))
    table = take(change, 3)
    assert table is not None
    leaf, twins = change.prefix.publish(ROOT, KEYS[:3], bundles(table, 1))
    assert (leaf, [*twins]) == (KEYS[2], [])
    assert change.available == 1
    change.prefix.release(leaf)
    pool = change.done()
    assert pool.available == 4
    assert lookup(pool.prefix, KEYS[:5]) == 3
    assert lookup(pool.prefix, ()) == 0
    assert lookup(pool.prefix, KEYS[5:6]) == 0
    change = Transaction(pool)
    assert take(change, 2) is not None  # the free one, and one that is evicted
    assert lookup(change.prefix, KEYS[:3]) == 2, "the end of the chain goes first"
    change.prefix.hold(KEYS[1])
    assert change.available == 0
    assert take(change, 1) is None
    change.prefix.release(KEYS[1])
    assert take(change, 2) is not None
    assert lookup(change.prefix, KEYS[:3]) == 0


def test_a_twin_stays_private_and_its_holder_stands_on_the_cached_one() -> None:
    change = Transaction(Blocks(Pool(8)))
    one, two = take(change, 2), take(change, 3)
    assert one is not None
    assert two is not None
    leaf, _ = change.prefix.publish(ROOT, KEYS[:2], bundles(one, 1))
    other, twins = change.prefix.publish(ROOT, KEYS[:3], bundles(two, 1))
    assert flattened(twins) == two[:2]
    assert other == KEYS[2]
    assert pages_of(change.prefix, KEYS[:3]) == (*one, two[2])
    change.pool.release(flattened(twins))
    change.prefix.release(leaf)
    assert change.available == 5, "the second holds the whole chain"
    change.prefix.release(other)
    assert change.available == 8


def test_a_parent_used_after_its_child_goes_after_what_is_older() -> None:
    change = Transaction(Blocks(Pool(3)))
    chain = take(change, 2)
    assert chain is not None
    child, _ = change.prefix.publish(ROOT, KEYS[:2], bundles(chain, 1))
    change.prefix.release(child)
    lone = take(change, 1)
    assert lone is not None
    change.prefix.publish(ROOT, KEYS[9:10], bundles(lone, 1))
    change.prefix.release(KEYS[9])
    change.prefix.hold(KEYS[0])
    change.prefix.release(KEYS[0])
    assert take(change, 1) == (chain[1],)
    assert take(change, 1) == (lone[0],)
    assert take(change, 1) == (chain[0],)


def test_of_several_that_go_at_once_a_parent_waits_for_what_is_older() -> None:
    change = Transaction(Blocks(Pool(4)))
    chain = take(change, 2)
    assert chain is not None
    child, _ = change.prefix.publish(ROOT, KEYS[:2], bundles(chain, 1))
    change.prefix.release(child)
    for key in KEYS[9:11]:
        lone = take(change, 1)
        assert lone is not None
        change.prefix.publish(ROOT, (key,), [lone])
        change.prefix.release(key)
    change.prefix.hold(KEYS[0])
    change.prefix.release(KEYS[0])
    assert change.prefix.evict(3).keys == (KEYS[1], KEYS[9], KEYS[10])
    assert change.prefix.evict(1).keys == (KEYS[0],)


def test_a_parent_that_was_used_before_its_child_goes_with_it() -> None:
    change = Transaction(Blocks(Pool(4)))
    chain = take(change, 2)
    assert chain is not None
    child, _ = change.prefix.publish(ROOT, KEYS[:2], bundles(chain, 1))
    lone = take(change, 1)
    assert lone is not None
    change.prefix.publish(ROOT, KEYS[9:10], bundles(lone, 1))
    change.prefix.release(child)
    change.prefix.release(KEYS[9])
    assert change.prefix.evict(2).keys == (KEYS[1], KEYS[0])


def test_only_the_first_keys_are_looked_up_and_a_gap_ends_a_hit() -> None:
    change = Transaction(Blocks(Pool(8)))
    table = take(change, 5)
    assert table is not None
    change.prefix.publish(ROOT, KEYS[:5], bundles(table, 1))
    assert [lookup(change.prefix, KEYS[:9], end) for end in (0, 1, 3, 5, 9, None)] == [
        0,
        1,
        3,
        5,
        5,
        5,
    ]
    assert lookup(change.prefix, KEYS[1:2]) == 1
    assert lookup(change.prefix, KEYS[6:9]) == 0


def test_a_block_with_users_is_live() -> None:
    change = Transaction(Blocks(Pool(8)))
    table = take(change, 3)
    assert table is not None
    leaf, _ = change.prefix.publish(ROOT, KEYS[:3], bundles(table, 1))
    assert [is_live(change.prefix, key) for key in KEYS[:4]] == [True, True, True, False]
    change.prefix.hold(KEYS[1])
    change.prefix.release(leaf)
    assert [is_live(change.prefix, key) for key in KEYS[:4]] == [True, True, False, False]
    assert (change.prefix.live, change.available) == (2, 6)


def test_a_branch_keeps_its_stem_and_counts_change_only_up_to_it() -> None:
    change = Transaction(Blocks(Pool(8)))
    stem = take(change, 2)
    assert stem is not None
    leaf, _ = change.prefix.publish(ROOT, KEYS[:2], bundles(stem, 1))
    leaves = []
    for key in KEYS[2:4]:
        twig = take(change, 1)
        assert twig is not None
        change.prefix.hold(KEYS[1])
        leaves.append(change.prefix.publish(KEYS[1], (key,), [twig])[0])
    change.prefix.release(leaf)
    assert counts(change, KEYS[1]) == (2, 2), "two users, two children"
    assert counts(change, KEYS[0]) == (1, 1)
    change.prefix.release(leaves[0])
    assert (counts(change, KEYS[1]), change.prefix.live) == ((1, 2), 3)
    change.prefix.release(leaves[1])
    assert counts(change, KEYS[0]) == (0, 1)
    assert (change.prefix.live, len(change.prefix.idle)) == (0, 2)
    take(change, 5)
    assert counts(change, KEYS[1]) == (0, 1), "one child is gone"
    assert lookup(change.prefix, (*KEYS[:2], KEYS[2])) == 2
    assert lookup(change.prefix, (*KEYS[:2], KEYS[3])) == 3


def test_a_stem_goes_after_what_was_used_before_it() -> None:
    change = Transaction(Blocks(Pool(4)))
    table = take(change, 4)
    assert table is not None
    leaf, _ = change.prefix.publish(ROOT, KEYS[:4], bundles(table, 1))
    change.prefix.release(leaf)
    assert take(change, 3) == (table[3], table[2], table[1])
    assert (len(change.prefix.idle), change.prefix.idle[0]) == (1, KEYS[0])
    assert lookup(change.prefix, KEYS[:1]) == 1
    change.prefix.hold(KEYS[0])
    assert not change.prefix.idle
    assert take(change, 1) is None


def test_a_block_named_by_itself_is_held_and_a_twin_is_not_named() -> None:
    change = Transaction(Blocks(Pool(4)))
    table = take(change, 2)
    assert table is not None
    assert change.prefix.publish_alone(KEYS[0], table[0:][:1])
    assert not change.prefix.publish_alone(KEYS[0], table[1:][:1])
    assert (change.prefix.live, change.available) == (1, 2)
    change.prefix.release(KEYS[0])
    assert (change.prefix.live, change.available) == (0, 3)
    assert (len(change.prefix.idle), change.prefix.idle[0]) == (1, KEYS[0])


def test_eviction_is_in_order_of_last_use_after_many_uses_of_some() -> None:
    """However far apart the tickets of what is idle are."""
    change, rng = Transaction(Blocks(Pool(40))), Random(1)
    uses = dict[int, int]()
    for at in range(40):
        assert take(change, 1) == (at,)
        change.prefix.publish(ROOT, KEYS[at : at + 1], bundles((at,), 1))
        change.prefix.release(KEYS[at])
        uses[at] = at
    for use in range(40, 3000):
        block = rng.choice((1, 2, 3)) if use % 500 else rng.randrange(40)
        change.prefix.hold(KEYS[block])
        change.prefix.release(KEYS[block])
        uses[block] = use
    pool = change.done()
    assert pool == evolve(
        pool, prefix=evolve(pool.prefix, words=words_of(pool.prefix.idle))
    ), "the words are those of what is idle"
    order = sorted(uses, key=uses.__getitem__)
    for at in range(0, 40, 8):
        change = Transaction(pool)
        assert take(change, 8) == tuple(order[at : at + 8])
        pool = change.done()


def test_who_leaves_takes_the_next_ticket() -> None:
    """Digests of journals hold it, so its steps cannot be chosen freely."""
    change = Transaction(Blocks(Pool(4)))
    table = take(change, 2)
    assert table is not None
    leaf, _ = change.prefix.publish(ROOT, KEYS[:2], bundles(table, 1))
    for left in range(3):
        assert change.prefix.next_use == left
        change.prefix.release(leaf)
        change.prefix.hold(leaf)
    assert change.done().prefix.next_use == 3


@define
class TwoIndexes:
    """The same blocks twice: users of a block count all behind it, or a map has the
    holders alone.
    """

    counted: Transaction
    mapped: Transaction
    held: list[bytes] = field(factory=list)

    @classmethod
    def of(cls, pages: int) -> "TwoIndexes":
        mapped = PrefixIndex(held=Map())
        return cls(
            Transaction(Blocks(Pool(pages))), Transaction(Blocks(Pool(pages), mapped))
        )

    def hold(self, key: bytes) -> None:
        for one in (self.counted, self.mapped):
            one.prefix.hold(key)
        self.held.append(key)

    def release(self, at: int) -> None:
        key = self.held.pop(at)
        for one in (self.counted, self.mapped):
            one.prefix.release(key)

    def take(self, count: int) -> tuple[int, ...] | None:
        first, second = (one.take(count) for one in (self.counted, self.mapped))
        assert first == second, "the same pages, of the same blocks"
        return first.pages if first else None

    def add(self, parent: bytes, keys: tuple[bytes, ...], pages: tuple[int, ...]) -> None:
        blocks = bundles(pages, len(pages) // len(keys))
        self.mapped.prefix.add_idle(parent, keys, blocks)
        change = self.counted.prefix
        change.hold(parent)
        leaf, twins = change.publish(parent, keys, blocks)
        assert not twins
        change.release(leaf)

    def compare(self) -> list[bytes]:
        """The cached blocks, which are the same."""
        first, second = self.counted.done(), self.mapped.done()
        assert first.pool == second.pool
        cached, same = every_node(first.prefix), every_node(second.prefix)
        for key, one in cached.items():
            other = same.pop(key)
            assert (one.pages, one.parent) == (other.pages, other.parent)
            assert (one.children, other.users) == (other.children, 0)
        assert not same
        assert second.prefix.live == 0
        held = second.prefix.held
        assert held is not None
        assert dict(held) == Counter(self.held)
        for most in (1, 2, 5, 100):
            can = count_evictable(second.prefix, second.prefix.idle, most)
            assert can == min(most, first.idle), "as many as have no users"
        self.counted, self.mapped = Transaction(first), Transaction(second)
        return sorted(cached)


@pytest.mark.parametrize("seed", range(30))
def test_blocks_held_alone_are_evicted_as_those_whose_users_are_counted(
    seed: int,
) -> None:
    rng, fresh = Random(seed), iter(range(10**6))
    both = TwoIndexes.of(rng.choice((6, 12, 30)))
    size = rng.choice((1, 1, 2))
    for _ in range(150):
        cached = both.compare()
        match rng.randrange(4):
            case 0 if cached:
                both.hold(rng.choice(cached))
            case 1 if both.held:
                both.release(rng.randrange(len(both.held)))
            case _:
                parent, count = rng.choice([ROOT, *cached]), rng.randint(1, 3)
                if parent:
                    both.hold(parent)
                pages = both.take(count * size)
                if pages is not None:
                    keys = tuple([b"%d" % next(fresh) for _ in range(count)])
                    both.add(parent, keys, pages)
                if parent:
                    both.release(-1)


def test_what_is_held_in_a_map_costs_one_step_at_any_depth() -> None:
    """Holding and releasing, and a block more behind it, touch as many nodes."""
    touched = list[int]()
    for depth in (2, 200):
        both = Transaction(Blocks(Pool(300), PrefixIndex(held=Map())))
        pages = take(both, depth)
        assert pages is not None
        both.prefix.add_idle(ROOT, KEYS[:depth], bundles(pages, 1))
        before = both.done()
        change = Transaction(before)
        change.prefix.hold(KEYS[depth - 1])
        change.prefix.add_idle(KEYS[depth - 1], (b"new",), [(299,)])
        change.prefix.release(KEYS[depth - 1])
        after = change.done().prefix.nodes
        old = before.prefix.nodes
        touched.append(sum(after[key] is not old.get(key) for key in after))
    assert touched == [2, 2]


@pytest.mark.parametrize("seed", range(30))
def test_a_pinned_block_is_a_held_one_that_counts_elsewhere(seed: int) -> None:
    """Of two indexes one pins where the other one holds: the same is evicted, in the same
    order, and users are the same with those that pin.
    """
    rng, fresh = Random(seed), iter(range(10**6))
    size = rng.choice((6, 12, 30))
    plain, pins = (Transaction(Blocks(Pool(size))) for _ in range(2))
    held, pinned, was_apart = list[bytes](), list[bytes](), False
    for _ in range(200):
        first, second = plain.done(), pins.done()
        assert first.available == second.available
        apart = second.prefix.pinned
        was_apart = was_apart or bool(apart)
        cached, same = every_node(first.prefix), every_node(second.prefix)
        counted = {
            key: evolve(one, users=one.users + apart.get(key, 0))
            for key, one in same.items()
        }
        assert cached == counted
        assert all(same[key].users for key in apart)
        plain, pins = Transaction(first), Transaction(second)
        match rng.randrange(6):
            case 0 if cached:
                held.append(rng.choice([*cached]))
                plain.prefix.hold(held[-1])
                pins.prefix.hold(held[-1])
            case 1 | 2 if held:
                key = held.pop(rng.randrange(len(held)))
                plain.prefix.release(key)
                pins.prefix.release(key)
            case 3 if cached:
                pinned.append(rng.choice([*cached]))
                plain.prefix.hold(pinned[-1])
                pins.prefix.pin(pinned[-1])
            case 4 if pinned:
                key = pinned.pop(rng.randrange(len(pinned)))
                plain.prefix.release(key)
                pins.prefix.unpin(key)
            case _:
                count = rng.randint(1, 3)
                parent = rng.choice([ROOT, *held])
                taken = plain.take(count)
                assert pins.take(count) == taken
                if taken is not None:
                    keys = tuple([b"%d" % next(fresh) for _ in range(count)])
                    for one in (plain, pins):
                        one.prefix.publish(parent, keys, bundles(taken.pages, 1))
                    held = [*held, keys[-1]]
                    if parent:
                        held.remove(parent)
    assert was_apart, "a block with users is not held anew"

"""The index against sets of keys, one for each replica; and that what left is swept."""

from zlib import crc32

import hypothesis.strategies as st
import pytest
from hypothesis import given

from minfer.blocks.keys import Keys, block_keys
from minfer.routing import key_index
from minfer.routing.key_index import (
    SHARDS,
    KeyIndex,
    add_slot,
    evict,
    holders,
    prefix_hits,
    publish,
    remove_slot,
    sweep,
)


def chain(length: int, first: int = 0) -> Keys:
    return block_keys(b"", (first,) + (0,) * (length - 1), 1) if length else ()


def filled(*lengths: int) -> KeyIndex:
    """Replicas with the first blocks of one chain, so many each."""
    index = KeyIndex()
    for length in lengths:
        slot, index = add_slot(index)
        index = publish(index, slot, chain(length))
    return index


def swept(index: KeyIndex) -> KeyIndex:
    for _ in range(2 * SHARDS):
        index = sweep(index)
    return index


def kept(index: KeyIndex) -> dict[bytes, int]:
    return {key: slots for shard in index.shards.values() for key, slots in shard.items()}


def test_slots_are_bits_from_the_lowest_on() -> None:
    index, slots = KeyIndex(), []
    for _ in range(3):
        slot, index = add_slot(index)
        slots.append(slot)
    assert slots == [1, 2, 4]
    assert index.used == 7


@given(st.lists(st.integers(0, 40), max_size=20), st.integers(0, 40))
def test_hits_are_the_leading_blocks_of_each(lengths: list[int], asked: int) -> None:
    index = filled(*lengths)
    pairs = ((1 << at, min(length, asked)) for at, length in enumerate(lengths))
    right = {slot: blocks for slot, blocks in pairs if blocks}
    assert prefix_hits(index, chain(asked)) == right
    assert prefix_hits(index, chain(asked, first=1)) == {}


def test_a_prompt_of_a_thousand_blocks_takes_some_look_ups_for_each_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index, seen = filled(1000, 600, 600, 17), list[bytes]()

    def counted(key: bytes) -> int:
        seen.append(key)
        return crc32(key)

    monkeypatch.setattr(key_index, "crc32", counted)
    assert prefix_hits(index, chain(1000)) == {1: 1000, 2: 600, 4: 600, 8: 17}
    assert len(seen) <= 3 * 11


def test_what_is_evicted_is_gone_and_what_is_not_there_changes_nothing() -> None:
    index = filled(5, 5)
    index = evict(index, 1, chain(5)[3:])
    assert prefix_hits(index, chain(5)) == {1: 3, 2: 5}
    same = evict(index, 1, (*chain(5)[3:], b"unknown", *chain(2, first=1)))
    assert same == index
    index = evict(index, 2, chain(5))
    assert prefix_hits(index, chain(5)) == {1: 3}
    assert kept(index) == dict.fromkeys(chain(3), 1)


def test_published_twice_is_published_once() -> None:
    index = filled(5)
    again = publish(index, 1, chain(6))
    assert prefix_hits(again, chain(9)) == {1: 6}
    assert kept(evict(again, 1, chain(6))) == {}


def test_who_left_holds_nothing_at_once_and_is_swept_out() -> None:
    index = filled(50, 30)
    index = remove_slot(index, 1)
    assert prefix_hits(index, chain(50)) == {2: 30}
    assert holders(index, chain(50)[40]) == 0
    assert len(kept(index)) == 50
    index = swept(index)
    assert kept(index) == dict.fromkeys(chain(30), 2)
    assert (index.used, index.leaving, index.left, index.cursor) == (2, 0, 0, 0)


def test_a_slot_is_not_given_again_before_it_is_swept_out() -> None:
    index = remove_slot(filled(50, 30), 1)
    for _ in range(SHARDS - 1):
        index = sweep(index)
    slot, index = add_slot(index)
    assert slot == 4
    index = sweep(index)
    assert add_slot(index)[0] == 1


def test_who_leaves_during_a_pass_has_a_pass_of_its_own() -> None:
    index = filled(30, 50, 20)
    index = remove_slot(index, 1)
    for _ in range(SHARDS // 2):
        index = sweep(index)
    index = remove_slot(remove_slot(index, 2), 4)
    assert prefix_hits(index, chain(50)) == {}
    assert (index.leaving, index.left) == (1, 6)
    for _ in range(SHARDS // 2):
        index = sweep(index)
    assert (index.leaving, index.left, index.cursor) == (6, 0, 0)
    slot, _ = add_slot(index)
    assert slot == 1
    index = swept(index)
    assert kept(index) == {}
    assert sweep(index) is index


def test_a_pass_begins_with_the_first_shard() -> None:
    index = swept(remove_slot(filled(50), 1))
    index = remove_slot(publish(add_slot(index)[1], 1, chain(50)), 1)
    assert index.cursor == 0
    for _ in range(SHARDS):
        index = sweep(index)
    assert kept(index) == {}


def test_keys_of_one_replica_share_an_integer() -> None:
    index = KeyIndex()
    for _ in range(12):
        slot, index = add_slot(index)
    index = publish(index, slot, chain(9))
    assert len({id(slots) for slots in kept(index).values()}) == 1


def test_the_first_and_the_last_shard_are_swept_too() -> None:
    keys = [b"%d" % number for number in range(5 * SHARDS)]
    ends = tuple(key for key in keys if crc32(key) % SHARDS in (0, SHARDS - 1))
    assert {crc32(key) % SHARDS for key in ends} == {0, SHARDS - 1}
    slot, index = add_slot(KeyIndex())
    index = remove_slot(publish(index, slot, ends), slot)
    assert sorted(kept(index)) == sorted(ends)
    shards = {*index.shards}
    for _ in range(SHARDS):
        index = sweep(index)
    assert kept(index) == {}
    assert {*index.shards} == shards, "no shard is made"

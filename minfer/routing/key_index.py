"""Which replica has which block in its prefix cache: content key -> set of replicas.

Theory. A set of replicas is an integer with a bit, the slot, for each. The cached blocks
of a replica are prefixes of chains of keys, without gaps (`minfer.blocks.prefix`), so the
replicas that have block i + 1 of a prompt are among those that have block i. One binary
search over the prompt's keys therefore finds the hits of all replicas: it goes on in both
halves only where replicas differ.

Keys are spread over shards. When a replica leaves, its bit is masked from then on, and
removed from one shard after the other with the events that follow: no turn takes time for
all keys. The bit is given to another replica only after that.
"""

from typing import Final
from zlib import crc32

from attrs import frozen

from minfer.blocks.keys import Key, Keys
from minfer.values.pmap import Map
from minfer.values.record import evolve

SHARDS: Final = 4096  # 250 keys in each of a million

Slots = int  # a set of slots, one bit each
_NONE: Final = Map[Key, Slots]()


@frozen
class KeyIndex:
    """The blocks that replicas have. A pass removes the bits `leaving` from one shard
    after the other, and has come to shard `cursor`; `left` are removed in the next pass.
    """

    shards: Map[int, Map[Key, Slots]] = Map()
    used: Slots = 0
    leaving: Slots = 0
    left: Slots = 0
    cursor: int = 0


def add_slot(index: KeyIndex) -> tuple[Slots, KeyIndex]:
    """Take the lowest free slot: its bit, and the index."""
    busy = index.used | index.leaving | index.left
    slot = ~busy & (busy + 1)
    return slot, evolve(index, used=index.used | slot)


def remove_slot(index: KeyIndex, slot: Slots) -> KeyIndex:
    """Remove a replica with all its keys."""
    index = evolve(index, used=index.used & ~slot)
    if index.leaving:
        return evolve(index, left=index.left | slot)
    return evolve(index, leaving=slot)


def publish(index: KeyIndex, slot: Slots, keys: Keys) -> KeyIndex:
    """Add keys to what a replica has."""
    shards = index.shards.mutate()
    for key in keys:
        number = crc32(key) % SHARDS
        shard = shards.get(number, _NONE)
        slots = shard.get(key)
        # A key of one replica shares the integer with all others of that replica.
        shards[number] = shard.set(key, slot if slots is None else slots | slot)
    return evolve(index, shards=shards.finish())


def evict(index: KeyIndex, slot: Slots, keys: Keys) -> KeyIndex:
    """Remove keys from what a replica has."""
    shards = index.shards.mutate()
    for key in keys:
        number = crc32(key) % SHARDS
        shard = shards.get(number, _NONE)
        slots = shard.get(key, 0)
        if slots & slot:
            shards[number] = _with_slots(shard, key, slots & ~slot)
    return evolve(index, shards=shards.finish())


def _with_slots(shard: Map[Key, Slots], key: Key, slots: Slots) -> Map[Key, Slots]:
    return shard.set(key, slots) if slots else shard.delete(key)


def sweep(index: KeyIndex) -> KeyIndex:
    """Remove the bits of replicas that left from one more shard."""
    leaving = index.leaving
    if not leaving:
        return index
    shards, shard = index.shards, index.shards.get(index.cursor, _NONE)
    stale = [entry for entry in shard.items() if entry[1] & leaving]
    if stale:
        new_shard = shard.mutate()
        for key, slots in stale:
            if slots & ~leaving:
                new_shard[key] = slots & ~leaving
            else:
                del new_shard[key]
        shards = shards.set(index.cursor, new_shard.finish())
    if index.cursor + 1 < SHARDS:
        return evolve(index, shards=shards, cursor=index.cursor + 1)
    return evolve(index, shards=shards, cursor=0, leaving=index.left, left=0)


def holders(index: KeyIndex, key: Key) -> Slots:
    """The replicas that have a block."""
    return index.shards.get(crc32(key) % SHARDS, _NONE).get(key, 0) & index.used


def prefix_hits(index: KeyIndex, keys: Keys) -> dict[Slots, int]:
    """The number of leading blocks that each replica has, by its slot; without replicas
    that lack the first block.
    """
    if not keys:
        return {}
    hits: dict[Slots, int] = {}
    shards = index.shards
    # Replicas that have `low` blocks at least and `high` at most.
    ranges = [(1, len(keys), holders(index, keys[0]))]
    while ranges:
        low, high, slots = ranges.pop()
        while slots and low < high:
            middle = (low + high + 1) >> 1
            key = keys[middle - 1]
            holding = slots & shards.get(crc32(key) % SHARDS, _NONE).get(key, 0)
            if holding == slots:
                low = middle
            else:
                ranges.append((middle, high, holding))
                high, slots = middle - 1, slots ^ holding
        while slots:
            slot = slots & -slots
            hits[slot] = low
            slots ^= slot
    return hits

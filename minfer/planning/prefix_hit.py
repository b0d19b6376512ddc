"""The prefix hit of a sequence to be admitted, and how many blocks it needs beside it."""

from bisect import bisect_left

from attrs import frozen

from minfer.blocks.keys import Key, Keys
from minfer.blocks.ownership import Blocks, Transaction
from minfer.blocks.prefix import ROOT, blocks_of, live, lookup
from minfer.blocks.window import GONE, lookup_window, outside
from minfer.records.config import EngineConfig
from minfer.records.sequence import Sequence
from minfer.records.state import EngineState
from minfer.values import thresholds


@frozen
class Hit:
    """The cached part of a newcomer's prefix."""

    blocks: int  # how many count as hit, with those outside the window
    table: tuple[int, ...]  # the blocks
    leaf: Key  # of the last of them, which the newcomer holds
    low: int = 0  # how many leading ones are outside the window


def take_hit(
    config: EngineConfig, state: EngineState, change: Transaction, keys: Keys, full: int
) -> Hit:
    """Hold the cached ones of the first `full` blocks."""
    prefix = state.blocks.prefix
    if not config.window:
        hit = lookup(prefix, keys, full)
        leaf = keys[hit - 1] if hit else ROOT
        change.prefix.hold(leaf)
        return Hit(hit, _blocks_of_chain(state, keys[:hit]), leaf)
    size = config.block_size
    hit = lookup_window(prefix, keys, full, config.window, size)
    low = outside(hit * size, config.window, size)
    for key in keys[low:hit]:
        change.prefix.hold(key)
    table = (GONE,) * low + blocks_of(prefix, keys[low:hit])
    return Hit(hit, table, ROOT, low)


def _blocks_of_chain(state: EngineState, keys: Keys) -> tuple[int, ...]:
    """The blocks of the chain `keys`, all of which are cached.

    A path in the forest is unique: if another table has the last of these blocks at the
    same entry, it has them all. Requests that share a long prefix tend to arrive
    together, so the last tables are tried first.
    """
    prefix, hit = state.blocks.prefix, len(keys)
    if hit >= thresholds.LONG_PREFIX:
        (last,) = blocks_of(prefix, keys[-1:])
        for table in state.running.tables[-thresholds.NEIGHBOURS :]:
            if len(table) > hit and table[hit - 1] == last:
                return table[:hit]
    return blocks_of(prefix, keys)


def readable_blocks(seq: Sequence, full: int) -> int:
    """How many of its first `full` blocks `seq` may take from the cache."""
    return full if seq.reads_cache else 0


def blocks_needed(
    config: EngineConfig, blocks: Blocks, seq: Sequence, *, alone: bool
) -> int:
    """How many of the available blocks it takes to admit `seq`.

    Its cached blocks that running sequences hold cost nothing; cached blocks without a
    reference count as available until it holds them. So the number falls when another
    sequence publishes the same prefix, without any block being freed. It takes O(log n)
    in the length of the prompt, as the referenced blocks of a path in the forest are its
    beginning.
    """
    size = config.block_size
    full = readable_blocks(seq, (len(seq.history) - 1) // size)
    if config.window:
        hit = lookup_window(blocks.prefix, seq.keys, full, config.window, size)
        low = outside(hit * size, config.window, size)
        idle = sum(not live(blocks.prefix, key) for key in seq.keys[low:hit])
        free_of_charge = hit - idle
    else:
        free_of_charge = bisect_left(
            seq.keys, True, hi=full, key=lambda key: not live(blocks.prefix, key)
        )
    return blocks_if_uncached(config, seq, alone=alone) - free_of_charge


def blocks_if_uncached(config: EngineConfig, seq: Sequence, *, alone: bool) -> int:
    """How many blocks it takes to admit `seq` if none of its blocks is cached; `alone`:
    no other sequence runs.
    """
    size, known = config.block_size, len(seq.history)
    # If its blocks are full, it needs one more in its second step, or would be preempted
    # right after its first.
    ends = seq.request.most_known(config.max_model_len)
    one_more = known % size == 0 and known + 1 < ends
    spare = 0 if alone else max(config.watermark, one_more)
    return -(-known // size) + spare

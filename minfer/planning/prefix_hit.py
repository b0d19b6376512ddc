"""The prefix hit of a sequence to be admitted, and how many pages it needs beside it."""

from bisect import bisect_left

from attrs import frozen

from minfer.blocks.keys import Key, Keys, group_key, group_keys
from minfer.blocks.ownership import Blocks, Transaction
from minfer.blocks.prefix import (
    ROOT,
    BlockLookup,
    Index,
    Pages,
    is_live,
    lookup,
    pages_of,
)
from minfer.blocks.window import GONE, lookup_window, outside, unreleased
from minfer.records.config import CacheGroup, EngineConfig
from minfer.records.sequence import Sequence
from minfer.records.state import EngineState
from minfer.values import thresholds
from minfer.values.record import evolve


@frozen
class Found:
    """How many blocks of a prefix are cached for all groups."""

    blocks: int
    cached: int  # in the group without a window
    missed: int | None = None  # the group with a window that misses the next one of these
    # what `blocks` would be if a state were kept after every block
    shared: int = 0


@frozen
class Hit:
    """The cached part of a newcomer's prefix."""

    found: Found
    tables: tuple[Pages, ...]  # by group: the pages
    leaf: Key  # of the last block without a window, which the newcomer holds
    low: tuple[int, ...]  # by group: how many leading blocks are outside the window
    state: Key = ROOT  # of recurrent layers, after the last of the blocks

    @property
    def blocks(self) -> int:
        """How many blocks count as hit, with those outside windows."""
        return self.found.blocks


def find_hit(config: EngineConfig, prefix: BlockLookup, keys: Keys, full: int) -> Found:
    """The longest hit within the first `full` blocks: every group has all cached that the
    next query reads and, with a state group, a state is kept after the last block.
    """
    found = _find_blocks(config, prefix, keys, full)
    if config.state_group is None:
        return found
    hit, shared = found.blocks, found.blocks
    while hit and group_key(keys[hit - 1], config.state_group) not in prefix.nodes:
        hit -= 1
        # A shorter hit may need blocks of windows that were released since.
        hit = _find_blocks(config, prefix, keys, hit).blocks if config.by_chunk else hit
    return evolve(found, blocks=hit, shared=shared)


def _find_blocks(
    config: EngineConfig, prefix: BlockLookup, keys: Keys, full: int
) -> Found:
    """The hit in the groups that have blocks: shortened by one after the other until it
    is stable.
    """
    size, hit, has_full_attention = config.block_size, full, False
    windows: list[tuple[int, CacheGroup]] = []
    for g, group in enumerate(config.block_groups):
        if group.window:
            windows.append((g, group))
        else:
            hit, has_full_attention = lookup(prefix, keys, full, g), True
    cached, missed, before = hit, None, -1
    while windows and hit != before:
        before = hit
        for g, group in windows:
            sinks = group.sink_blocks(size)
            now = lookup_window(prefix, keys, hit, group.window, size, g, sinks)
            if now < hit:
                hit, missed = now, g
    return Found(hit, cached, missed if has_full_attention else None, hit)


def take_hit(
    config: EngineConfig, state: EngineState, change: Transaction, keys: Keys, full: int
) -> Hit:
    """Hold the cached ones of the first `full` blocks, but not the state after them."""
    prefix, size = state.blocks.prefix, config.block_size
    prefix_hit = find_hit(config, prefix, keys, full)
    hit, leaf = prefix_hit.blocks, ROOT
    tables: list[Pages] = []
    lows: list[int] = []
    for g, group in enumerate(config.block_groups):
        low, sinks = outside(hit * size, group.window, size), group.sink_blocks(size)
        own_keys = group_keys(unreleased(keys, 0, hit, low, sinks), g)
        if group.window:
            for key in own_keys:
                change.prefix.hold(key)
            found_pages = pages_of(prefix, own_keys)
            first = sinks * group.pages
            released = (GONE,) * (max(low - sinks, 0) * group.pages)
            table = found_pages[:first] + released + found_pages[first:]
        else:
            leaf = own_keys[-1] if hit else ROOT
            change.prefix.hold(leaf)
            table = _pages_of_chain(state, own_keys, g, group.pages)
        tables.append(table)
        lows.append(low)
    state_key = ROOT
    if hit and config.state_group is not None:
        state_key = group_key(keys[hit - 1], config.state_group)
    return Hit(prefix_hit, tuple(tables), leaf, tuple(lows), state_key)


def _pages_of_chain(state: EngineState, keys: Keys, g: int, pages: int) -> Pages:
    """The pages of the chain `keys` in group `g`, all of which are cached.

    A path in the forest is unique: if another table has the last of these blocks at the
    same entry, it has them all. Requests that share a long prefix tend to arrive
    together, so the last tables are tried first.
    """
    prefix, end = state.blocks.prefix, len(keys) * pages
    if len(keys) >= thresholds.LONG_PREFIX:
        last = pages_of(prefix, keys[-1:])[-1]
        for tables in state.running.tables[-thresholds.NEIGHBOURS :]:
            if len(tables[g]) > end and tables[g][end - 1] == last:
                return tables[g][:end]
    return pages_of(prefix, keys)


def readable_blocks(seq: Sequence, full: int) -> int:
    """How many of its first `full` blocks `seq` may take from the cache."""
    return full if seq.reads_cache else 0


def pages_needed(
    config: EngineConfig, blocks: Blocks, seq: Sequence, *, runs_alone: bool
) -> int:
    """How many of the available pages it takes to admit `seq`.

    Its cached blocks that running sequences hold cost nothing; cached blocks without a
    reference count as available until it holds them. So the number falls when another
    sequence publishes the same prefix, without any block being freed. Without a window it
    takes O(log n) in the length of the prompt, as the referenced blocks of a path in the
    forest are its beginning.
    """
    size, prefix, keys = config.block_size, blocks.prefix, seq.keys
    full = readable_blocks(seq, (len(seq.history) - 1) // size)
    hit = find_hit(config, prefix, keys, full).blocks
    free_of_charge = 0
    for g, group in enumerate(config.block_groups):
        if group.window:
            low = outside(hit * size, group.window, size)
            own_keys = group_keys(
                unreleased(keys, 0, hit, low, group.sink_blocks(size)), g
            )
            idle = sum(not is_live(prefix, key) for key in own_keys)
            live_blocks = len(own_keys) - idle
        else:
            live_blocks = _live_blocks(prefix, keys, hit, g)
        free_of_charge += live_blocks * group.pages
    return pages_if_uncached(config, seq, runs_alone=runs_alone) - free_of_charge


def _live_blocks(prefix: Index, keys: Keys, hit: int, g: int) -> int:
    """How many of the first `hit` blocks of a chain running sequences hold."""
    return bisect_left(
        keys, True, hi=hit, key=lambda key: not is_live(prefix, group_key(key, g))
    )


def pages_if_uncached(config: EngineConfig, seq: Sequence, *, runs_alone: bool) -> int:
    """How many pages it takes to admit `seq` if none of its blocks is cached;
    `runs_alone`: no other sequence runs. With a window those count that it must hold at
    once, though most are taken later.
    """
    size, num_known = config.block_size, len(seq.history)
    # If its blocks are full, it needs one more in its second step, or would be preempted
    # right after its first.
    ends = seq.request.most_known(config.max_model_len)
    one_more = num_known % size == 0 and num_known + 1 < ends
    spare = 0 if runs_alone else max(config.watermark, one_more * config.block_pages)
    return config.most_pages(-(-num_known // size)) + spare

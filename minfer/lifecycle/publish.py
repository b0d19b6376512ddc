"""Publishes full blocks: from then on other sequences can find them. In groups of layers
with a window, releases the blocks behind it.

A block is published once its KV is committed. Keys are made of tokens, so the tokens of a
block with a key leave the sequence's tail.
"""

from collections.abc import Mapping
from typing import Final

from minfer.blocks.keys import Key, Keys, block_key, group_keys
from minfer.blocks.ownership import Transaction
from minfer.blocks.prefix import bundles
from minfer.blocks.window import outside, unreleased
from minfer.lifecycle.committed import all_committed
from minfer.lifecycle.seat import publish_mark
from minfer.records.config import CacheGroup, EngineConfig
from minfer.records.sequence import Chain, Running, Table, edited
from minfer.records.state import EngineState
from minfer.values import thresholds
from minfer.values.log import Log
from minfer.values.record import evolve

RELEASE: Final = -1  # in place of a number of blocks: publish none, release only


Chunks = Log[tuple[int, ...]]


def compute_keys(
    config: EngineConfig, run: Running, i: int, upto: int
) -> tuple[Log[Key], Chunks, tuple[int, ...]]:
    """Give keys to the full blocks of `i` below `upto`; their tokens leave the tail.

    Returns all keys, the tokens of blocks with a key, and the tail without these.
    """
    chain = run.chains[i]
    tail = run.tails[i] + run.fresh[i]
    have = len(chain.keys)
    if upto <= have:
        return chain.keys, chain.chunks, tail
    size = config.block_size
    end = (upto - have) * size
    parent = chain.keys[have - 1] if have else run.seqs[i].request.root
    keys: list[Key] = []
    chunks: list[tuple[int, ...]] = []
    for start in range(0, end, size):
        chunk = tail[start : start + size]
        parent = block_key(parent, chunk)
        keys.append(parent)
        chunks.append(chunk)
    recent = thresholds.RECENT_ENTRIES
    extended = chain.keys.extended((*keys,), recent)
    return extended, chain.chunks.extended((*chunks,), recent), tail[end:]


def publish_blocks(
    config: EngineConfig, state: EngineState, upto: dict[int, int]
) -> EngineState:
    """Publish full blocks of running sequences: position -> the number of blocks with KV.

    If another sequence computed the same content at the same time and it is cached
    already, the block and those after it stay private until the sequence leaves: it does
    not switch to the cached twin, as admission reserved only its own blocks. If the
    number is `RELEASE`, nothing is published; only blocks behind windows are released.
    """
    chains = state.running.chains
    upto = {
        i: count
        for i, count in upto.items()
        if count > min(chains[i].sealed) or count == RELEASE
    }
    return _publish(config, state, upto) if upto else state


def release_windows(config: EngineConfig, state: EngineState) -> EngineState:
    """Release all blocks behind the windows of running sequences, now that blocks are
    short; full ones are published before.
    """
    run = state.running
    committed = all_committed(config, state, range(len(run)))
    anew = [seq.request.recomputes_prompt for seq in run.seqs]
    upto = {
        i: RELEASE if anew[i] else sure // config.block_size
        for i, sure in committed.items()
    }
    return _publish(config, state, upto)


def release_if_short(config: EngineConfig, state: EngineState, pages: int) -> EngineState:
    """Release all blocks behind windows if fewer than `pages` are available."""
    short = config.by_chunk and pages > state.blocks.available
    return release_windows(config, state) if short else state


def window_blocks_coming(config: EngineConfig, state: EngineState) -> bool:
    """Whether steps in flight take a sequence so far that blocks leave its window."""
    if not state.inflight:
        return False
    run, size = state.running, config.block_size
    return any(
        outside(scheduled, group.window, size)
        > max(chain.low[g], group.sink_blocks(size))
        for scheduled, chain in zip(run.scheduled, run.chains, strict=True)
        for g, group in enumerate(config.block_groups)
    )


def _publish(
    config: EngineConfig, state: EngineState, upto: Mapping[int, int]
) -> EngineState:
    run = state.running
    change = Transaction(state.blocks)
    windows = any(group.window for group in config.block_groups)
    sure = all_committed(config, state, upto) if windows else {}
    chains: dict[int, Chain] = {}
    tails: dict[int, tuple[int, ...]] = {}
    publish_at: dict[int, int] = {}
    for i, count in upto.items():
        keys, chunks, tails[i] = compute_keys(config, run, i, count)
        chains[i] = _publish_groups(
            config, run, change, i, keys, chunks, count, sure.get(i, 0)
        )
        num_blocks = max(count, run.num_known_at_admission[i] // config.block_size)
        publish_at[i] = publish_mark(config, num_blocks, run.last_index[i])
    fresh: dict[int, tuple[int, ...]] = dict.fromkeys(tails, ())
    run = edited(run, chains=chains, tails=tails, fresh=fresh, publish_at=publish_at)
    return evolve(state, blocks=change.done(), running=run)


def _publish_groups(
    config: EngineConfig,
    run: Running,
    change: Transaction,
    i: int,
    keys: Log[Key],
    chunks: Chunks,
    count: int,
    sure: int,
) -> Chain:
    """Publish the full blocks below `count` of the sequence at `i` in each group: after
    its leaf, unless they have a twin, or where the group has a window, alone. `sure` of
    its tokens have committed KV.
    """
    chain, tables, prefix = run.chains[i], run.tables[i], change.prefix
    sealed, low, leaf = list(chain.sealed), list(chain.low), chain.leaf
    for g, group in enumerate(config.block_groups):
        have, pages, table = sealed[g], group.pages, tables[g]
        if group.window:
            num_outside = outside(sure, group.window, config.block_size)
            sinks = group.sink_blocks(config.block_size)
            sealed[g], low[g] = _publish_window(
                change, chain, keys, g, group, table, count, num_outside, sinks
            )
        elif have < count:
            own_keys = keys[have:count]
            own_keys = group_keys(own_keys, g) if g else own_keys
            if own_keys[0] not in prefix.nodes:
                new = bundles(table[have * pages : count * pages], pages)
                leaf, _ = prefix.publish(leaf, own_keys, new)
                sealed[g] = count
    return Chain(keys, tuple(sealed), leaf, chunks, tuple(low), chain.states)


def _publish_window(
    change: Transaction,
    chain: Chain,
    keys: Log[Key],
    g: int,
    group: CacheGroup,
    table: Table,
    count: int,
    num_outside: int,
    sinks: int,
) -> tuple[int, int]:
    """Publish a sequence's full blocks below `count` in group `g`; release those below
    `num_outside`, which are outside its window, but for the first `sinks`. Returns what
    is sealed and released then.

    A sink block that has a twin stays private until its sequence leaves, and as `sealed`
    counts leading blocks, so do those after it.
    """
    pages, sealed, low = group.pages, chain.sealed[g], chain.low[g]
    if sealed < count and (sealed >= sinks or low <= sinks):
        new = bundles(table[sealed * pages : count * pages], pages)
        for key, block in zip(group_keys(keys[sealed:count], g), new, strict=True):
            if not change.prefix.publish_alone(key, block):
                break
            sealed += 1
    first = max(low, sinks)  # of the blocks that are held beside those of the sinks
    for key in group_keys(keys[first : min(num_outside, sealed)], g):
        change.prefix.release(key)
    change.pool.release(table[max(first, sealed) * pages : num_outside * pages])
    return (sealed if sealed < sinks else max(sealed, num_outside)), max(low, num_outside)


def held_keys(config: EngineConfig, chain: Chain, g: int) -> Keys:
    """The keys of the published blocks that a sequence holds in group `g`."""
    group = config.groups[g]
    if not group.window:
        return (chain.leaf,)
    sinks = group.sink_blocks(config.block_size)
    chain_keys = unreleased(chain.keys, 0, chain.sealed[g], chain.low[g], sinks)
    return group_keys(chain_keys, g)

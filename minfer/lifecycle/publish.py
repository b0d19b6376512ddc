"""Publishes full blocks: from then on other sequences can find them.

A block is published once its KV is committed. Keys are made of tokens, so the tokens of a
block with a key leave the sequence's tail.
"""

from minfer.blocks.keys import Key, Keys, block_key
from minfer.blocks.ownership import Transaction
from minfer.blocks.prefix import PrefixChange
from minfer.blocks.window import outside
from minfer.lifecycle.committed import committed
from minfer.lifecycle.seat import publish_mark
from minfer.records.config import EngineConfig
from minfer.records.sequence import Chain, Running, Table, edited
from minfer.records.state import EngineState
from minfer.values import thresholds
from minfer.values.record import evolve


def compute_keys(
    config: EngineConfig, run: Running, i: int, upto: int
) -> tuple[Chain, tuple[int, ...]]:
    """Give keys to the full blocks of `i` below `upto`; their tokens leave the tail.

    Returns the chain with the keys, and the tail without the tokens.
    """
    chain = run.chains[i]
    tail = run.tails[i] + run.fresh[i]
    have = len(chain.keys)
    if upto <= have:
        return chain, tail
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
    chain = Chain(
        keys=chain.keys.extended((*keys,), recent),
        sealed=chain.sealed,
        leaf=chain.leaf,
        chunks=chain.chunks.extended((*chunks,), recent),
        low=chain.low,
    )
    return chain, tail[end:]


def publish_blocks(
    config: EngineConfig, state: EngineState, upto: dict[int, int]
) -> EngineState:
    """Publish full blocks of running sequences: position -> the number of blocks with KV.

    If another sequence computed the same content at the same time and it is cached
    already, the block stays private until its sequence leaves, as do the blocks after it:
    admission reserved blocks for the sequence's own table, not for holding the twin as
    well.
    """
    run = state.running
    upto = {i: count for i, count in upto.items() if count > run.chains[i].sealed}
    if not upto:
        return state
    change = Transaction(state.blocks)
    chains: dict[int, Chain] = {}
    tails: dict[int, tuple[int, ...]] = {}
    publish_at: dict[int, int] = {}
    for i, count in upto.items():
        chain, tails[i] = compute_keys(config, run, i, count)
        if config.window:
            sure = committed(config, state, i)
            chains[i] = _publish_window(config, change, chain, run.tables[i], count, sure)
        else:
            chains[i] = _publish_chain(change.prefix, chain, run.tables[i], count)
        whole = max(count, run.base[i] // config.block_size)
        publish_at[i] = publish_mark(config, whole, run.last[i])
    fresh: dict[int, tuple[int, ...]] = dict.fromkeys(tails, ())
    run = edited(run, chains=chains, tails=tails, fresh=fresh, publish_at=publish_at)
    return evolve(state, blocks=change.done(), running=run)


def _publish_chain(prefix: PrefixChange, chain: Chain, table: Table, count: int) -> Chain:
    """Publish a sequence's full blocks below `count` after its leaf, unless they have a
    twin.
    """
    keys = chain.keys[chain.sealed : count]
    if keys[0] in prefix.nodes:
        return chain
    leaf, _ = prefix.publish(chain.leaf, keys, table[chain.sealed : count])
    return Chain(chain.keys, count, leaf, chain.chunks, chain.low)


def _publish_window(
    config: EngineConfig,
    change: Transaction,
    chain: Chain,
    table: Table,
    count: int,
    position: int,
) -> Chain:
    """Publish a sequence's full blocks below `count`; release those behind its window."""
    low = outside(position, config.window, config.block_size)
    sealed = chain.sealed
    while sealed < count and change.prefix.publish_alone(
        chain.keys[sealed], table[sealed]
    ):
        sealed += 1
    for key in chain.keys[chain.low : min(low, sealed)]:
        change.prefix.release(key)
    change.pool.give(table[max(chain.low, sealed) : low])
    return evolve(chain, sealed=max(sealed, low), low=max(chain.low, low))


def held_keys(chain: Chain, window: int) -> Keys:
    """The keys of the published blocks that a sequence holds."""
    return chain.keys[chain.low : chain.sealed] if window else (chain.leaf,)

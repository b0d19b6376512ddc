"""Retirement: takes sequences out of the running ones, publishes what they computed and
releases their blocks.

Blocks that a plan in flight may still read or write are freed only when that plan is
over: until then they stay behind a fence.
"""

from collections.abc import Collection
from itertools import compress
from operator import not_

from attrs import frozen

from minfer.blocks.keys import Keys
from minfer.blocks.ownership import Transaction
from minfer.blocks.prefix import ROOT
from minfer.lifecycle.committed import all_committed
from minfer.lifecycle.publish import compute_keys, held_keys
from minfer.records.config import EngineConfig
from minfer.records.sequence import Running, without
from minfer.records.state import EngineState, Fence
from minfer.values.record import evolve


def retire(
    config: EngineConfig, state: EngineState, gone: Collection[int]
) -> EngineState:
    """Take sequences out of the running ones: publish what is committed, release the
    rest.

    In the order of `gone`, which are their positions. Blocks that a plan in flight may
    still write stay behind a fence until that plan is over.
    """
    if not gone:
        return state
    run = state.running
    change = Transaction(state.blocks)
    fences = [*state.fences]
    until = state.inflight[-1].step if state.inflight else None
    for i, sure in all_committed(config, state, gone).items():
        left = release_sequence(config, change, run, i, sure // config.block_size)
        if run.seqs[i].request.tails is not None:
            left = _publish_tail(config, change, run, i, sure, left)
        if until is None:
            free_blocks(change, left)
        else:
            fences.append(Fence(until, left.published, left.private))
    return evolve(
        state,
        blocks=change.done(),
        running=without(run, sorted(gone)),
        fences=tuple(fences),
        free_rows=(*state.free_rows, *(run.rows[i] for i in gone)),
    )


@frozen
class Released:
    """The blocks that a sequence leaves behind."""

    published: Keys  # keys of the published blocks that it holds
    private: tuple[int, ...]


def release_sequence(
    config: EngineConfig, change: Transaction, run: Running, i: int, upto: int
) -> Released:
    """Publish the first `upto` blocks of the sequence at `i`; returns the blocks it
    leaves.
    """
    chain, table = run.chains[i], run.tables[i]
    if upto <= chain.sealed:  # all that it computed is published
        return Released(held_keys(chain, config.window), table[chain.sealed :])
    chain, _ = compute_keys(config, run, i, upto)
    new = slice(chain.sealed, upto)
    rest = table[upto:]
    if not config.window:
        leaf, twins = change.prefix.publish(chain.leaf, chain.keys[new], table[new])
        return Released((leaf,), twins + rest)
    is_new = tuple(map(change.prefix.publish_alone, chain.keys[new], table[new]))
    mine = tuple(compress(chain.keys[new], is_new))
    twins = tuple(compress(table[new], map(not_, is_new)))
    return Released(held_keys(chain, config.window) + mine, twins + rest)


def _publish_tail(
    config: EngineConfig,
    change: Transaction,
    run: Running,
    i: int,
    sure: int,
    left: Released,
) -> Released:
    """Publish also the partial last block of the prompt of the sequence at `i`, if the KV
    of all its tokens is computed: of `sure` tokens. `left` are the other blocks it
    leaves.
    """
    request = run.seqs[i].request
    _, key = request.tails or (ROOT, ROOT)
    if key == ROOT or sure != len(request.prompt) or key in change.prefix.nodes:
        return left
    block = run.tables[i][sure // config.block_size]
    if config.window:
        change.prefix.publish_alone(key, block)
        published = (*left.published, key)
    else:
        leaf, _ = change.prefix.publish(left.published[0], (key,), (block,))
        published = (leaf,)
    return Released(published, tuple(one for one in left.private if one != block))


def free_blocks(change: Transaction, left: Released | Fence) -> None:
    """Release the blocks that a sequence had."""
    for key in reversed(
        left.published
    ):  # the last ones are evicted first, as the least used
        change.prefix.release(key)
    change.pool.give(left.private)


def free_fenced_blocks(state: EngineState, step: int | None) -> EngineState:
    """Free the blocks fenced until `step` or before; all of them if `step` is None."""
    if not state.fences:
        return state
    change = Transaction(state.blocks)
    kept: list[Fence] = []
    for fence in state.fences:
        if step is None or fence.until <= step:
            free_blocks(change, fence)
        else:
            kept.append(fence)
    return evolve(state, blocks=change.done(), fences=tuple(kept))

"""Retirement: takes sequences out of the running ones, publishes what they computed and
releases their blocks.

Blocks that a plan in flight may still read or write are freed only when that plan is
over: until then they stay behind a fence.
"""

from collections.abc import Collection, Sequence
from itertools import compress
from operator import not_

from attrs import frozen

from minfer.blocks.keys import Key, Keys, group_key, group_keys
from minfer.blocks.ownership import Transaction
from minfer.blocks.prefix import ROOT, Pages, bundles, flattened
from minfer.blocks.window import unreleased
from minfer.lifecycle.adapter_use import end_uses
from minfer.lifecycle.committed import all_committed
from minfer.lifecycle.publish import compute_keys, held_keys
from minfer.records.config import EngineConfig
from minfer.records.request import Request
from minfer.records.sequence import Chain, RowStates, Running, without
from minfer.records.state import EngineState, Fence
from minfer.values.record import evolve


def retire(
    config: EngineConfig, state: EngineState, leaving: Collection[int]
) -> EngineState:
    """Take sequences out of the running ones: publish what is committed, release the
    rest.

    In the order of `leaving`, which are their positions. Blocks that a plan in flight may
    still write stay behind a fence until that plan is over.
    """
    if not leaving:
        return state
    run = state.running
    change = Transaction(state.blocks)
    fences = [*state.fences]
    last_step = state.inflight[-1].step if state.inflight else None
    for i, sure in all_committed(config, state, leaving).items():
        left = release_sequence(config, change, run, i, sure)
        if last_step is None:
            free_blocks(change, left)
        else:
            fences.append(Fence(last_step, left.published, left.private))
    adapters = state.adapters
    if adapters.slots:
        adapters = end_uses(state, [run.seqs[i].request.adapter for i in leaving])
    return evolve(
        state,
        blocks=change.done(),
        running=without(run, sorted(leaving)),
        fences=tuple(fences),
        free_rows=(*state.free_rows, *(run.rows[i] for i in leaving)),
        adapters=adapters,
    )


@frozen
class Released:
    """The blocks that a sequence leaves behind."""

    published: Keys  # keys of the published blocks that it holds
    private: Pages


def release_sequence(
    config: EngineConfig, change: Transaction, run: Running, i: int, sure: int
) -> Released:
    """Publish the blocks of the sequence at `i` whose KV is computed: of `sure` tokens.
    Returns the blocks it leaves, in all groups.
    """
    chain, upto = run.chains[i], sure // config.block_size
    chain_keys = chain.keys
    if upto > min(chain.sealed):
        chain_keys, _, _ = compute_keys(config, run, i, upto)
    tail = ROOT if config.state_group else _tail(run.seqs[i].request, sure)
    published: Keys = ()
    private: Pages = ()
    for g, group in enumerate(config.block_groups):
        table, pages, have = run.tables[i][g], group.pages, chain.sealed[g]
        end = max(have, upto)
        sinks, low = group.sink_blocks(config.block_size), chain.low[g]
        keys = group_keys(unreleased(chain_keys, have, end, low, sinks), g)
        if tail != ROOT and group_key(tail, g) not in change.prefix.nodes:
            end, keys = end + 1, (*keys, group_key(tail, g))
        if keys:
            unpublished = unreleased(
                table, have * pages, end * pages, low * pages, sinks * pages
            )
            new = bundles(unpublished, pages)
            held_blocks, twins = _publish_last(config, change, chain, g, keys, new)
            private += flattened(twins)
        else:  # all that it computed is published
            held_blocks = held_keys(config, chain, g)
        published += held_blocks
        private += table[end * pages :]
    if config.state_group is None:
        return Released(published, private)
    states = _held_states(change, chain.states)
    return Released(states + published, private + run.tables[i][config.state_group][:])


def _held_states(change: Transaction, states: RowStates) -> Keys:
    """The kept states that a sequence which leaves holds: that from which it was to
    start; or the last one that it saved, so that it is evicted after the blocks behind
    it, without which it is of use, as they are not without it.
    """
    prefix = change.prefix
    if states.origin:
        return (states.origin,)
    last = next((key for key in reversed(states.kept) if key in prefix.nodes), ROOT)
    if not last:
        return ()
    prefix.hold(last)
    if last == states.checkpoint and prefix.unstored is not None:
        prefix.unstored += (last,)  # no other will take its place
    return (last,)


def _publish_last(
    config: EngineConfig,
    change: Transaction,
    chain: Chain,
    g: int,
    keys: Keys,
    new: list[Pages],
) -> tuple[Keys, Sequence[Pages]]:
    """Publish the last blocks of a sequence in group `g`. Returns the keys of all that it
    holds then, and the blocks that stay private.
    """
    if not config.groups[g].window:
        leaf, twins = change.prefix.publish(chain.leaf, keys, new)
        return (leaf,), twins
    is_new = tuple(map(change.prefix.publish_alone, keys, new))
    published = held_keys(config, chain, g) + tuple(compress(keys, is_new))
    return published, list(compress(new, map(not_, is_new)))


def _tail(request: Request, sure: int) -> Key:
    """The key under which the partial last block of its prompt is published, if the KV of
    all its tokens is computed: of `sure` tokens.
    """
    _, key = request.continuation.tail_keys or (ROOT, ROOT)
    return key if sure == len(request.prompt) else ROOT


def free_blocks(change: Transaction, left: Released | Fence) -> None:
    """Release the blocks that a sequence had."""
    for key in reversed(
        left.published
    ):  # the last ones are evicted first, as the least used
        change.prefix.release(key)
    change.pool.release(left.private)


def free_fenced_blocks(state: EngineState, step: int | None) -> EngineState:
    """Free the blocks fenced until `step` or before; all of them if `step` is None."""
    if not state.fences:
        return state
    change = Transaction(state.blocks)
    closed: list[Fence] = []
    for fence in state.fences:
        if step is None or fence.until <= step:
            free_blocks(change, fence)
        else:
            closed.append(fence)
    return evolve(state, blocks=change.done(), fences=tuple(closed))

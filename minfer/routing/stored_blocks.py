"""The token ids of blocks that were published in a turn, for routers that know blocks by
their tokens.

Theory. The prefix index has keys alone. But a block is published by a sequence that has
its tokens: one that runs, one that has just left, or one that waits for blocks from
another tier. All new blocks of a chain are found in the first such sequence; a later one
that shares the chain's beginning adds what follows. So no block comes before its parent.

The cost is that of the new blocks and of a look at each running sequence. It falls due
only in turns that publish.
"""

from collections.abc import Iterator
from itertools import chain as chained

from attrs import frozen

from minfer.blocks.keys import Key, Keys, extend_keys
from minfer.blocks.prefix import ROOT
from minfer.records.config import EngineConfig
from minfer.records.messages import Emit
from minfer.records.sequence import Running, SampleId
from minfer.records.state import EngineState, Transition


@frozen
class StoredBlocks:
    """Consecutive full blocks of a chain, which were published."""

    keys: Keys  # content keys
    parent: Key  # of the block before the first, or ROOT
    tokens: tuple[int, ...]
    root: Key  # of the request: the key before the first block of its chain


@frozen
class _Chain:
    """The end of a sequence's chain, which may have published blocks."""

    root: Key
    parent: Key  # before the first of `keys`, or ROOT
    keys: Keys
    tokens: tuple[int, ...]  # of these blocks, and perhaps more


def stored_blocks(
    config: EngineConfig, before: EngineState, transition: Transition, published: Keys
) -> Iterator[StoredBlocks]:
    """Yields the blocks that a turn `published` (content keys), with their tokens; none
    before its parent. Blocks of a sequence that is not served any more are left out.
    """
    wanted = set(published)
    chains = _chains(config, before, transition)
    while wanted and (chain := next(chains, None)):
        yield from _take(chain, wanted, config.block_size)


def _take(chain: _Chain, wanted: set[Key], size: int) -> Iterator[StoredBlocks]:
    """Yields the runs of wanted blocks of a chain, which are not wanted from then on."""
    keys, begin = chain.keys, 0
    while begin < len(keys):
        end = begin
        while end < len(keys) and keys[end] in wanted:
            end += 1
        if end > begin:
            wanted.difference_update(keys[begin:end])
            yield StoredBlocks(
                keys=keys[begin:end],
                parent=keys[begin - 1] if begin else chain.parent,
                tokens=chain.tokens[begin * size : end * size],
                root=chain.root,
            )
        begin = end + 1


def _chains(
    config: EngineConfig, before: EngineState, transition: Transition
) -> Iterator[_Chain]:
    """The sequences whose chains may have new blocks in the index."""
    after, old = transition.state, before.running
    run = after.running
    old_chains = dict(zip(old.run_ids, old.chains, strict=True))
    for i, run_id in enumerate(run.run_ids):
        old_chain = old_chains.get(run_id)
        if old_chain is None:  # admitted: what it hit may have been loaded
            yield _running_chain(config, run, i, 0)
        elif old_chain is not run.chains[i]:
            yield _running_chain(config, run, i, min(old_chain.sealed))
    remaining = set(run.run_ids)
    tokens = _emitted(transition)
    for i, run_id in enumerate(old.run_ids):
        if run_id not in remaining:
            yield _left_chain(config, old, i, tokens.get(old.ids[i], ()))
    loading = before.tiers.loading
    for seq in after.waiting if loading else ():
        if seq.request.id in loading:
            keys = seq.keys or seq.request.keys
            yield _Chain(seq.request.root, ROOT, keys, seq.history)


def _running_chain(config: EngineConfig, run: Running, i: int, first: int) -> _Chain:
    """The chain of a running sequence from block `first` on."""
    seq, chain, size = run.seqs[i], run.chains[i], config.block_size
    num_history = len(seq.history) // size  # blocks; the others are in chunks
    chunks = chain.chunks[max(0, first - num_history) :]
    history = seq.history[first * size : num_history * size]
    return _Chain(
        root=seq.request.root,
        parent=chain.keys[first - 1] if first else ROOT,
        keys=chain.keys[first:],
        tokens=(*history, *chained.from_iterable(chunks)),
    )


def _left_chain(
    config: EngineConfig, run: Running, i: int, new_tokens: tuple[int, ...]
) -> _Chain:
    """The chain of a sequence that left in the turn, with its last tokens."""
    size, chain, root = config.block_size, run.chains[i], run.seqs[i].request.root
    tokens = run.tokens(i, size) + new_tokens
    keys = extend_keys(chain.keys[:], root, tokens, size)
    first = min(chain.sealed)
    parent = keys[first - 1] if first else ROOT
    return _Chain(root, parent, keys[first:], tokens[first * size :])


def _emitted(transition: Transition) -> dict[SampleId, tuple[int, ...]]:
    """The tokens of a turn, by sample."""
    tokens = dict[SampleId, tuple[int, ...]]()
    for command in transition.commands:
        if isinstance(command, Emit):
            tokens.update(zip(command.ids, command.tokens, strict=True))
    return tokens

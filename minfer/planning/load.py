"""Loads blocks of a waiting sequence's prefix from a tier to the device.

The scheduler asks for the head of the queue, when there is room to admit it. If its
prefix goes on in a tier (`minfer.tiers`), and loading is expected to be faster than
computing, a transfer begins. This happens once while the sequence waits: what is evicted
meanwhile, or was lost, is computed.
"""

from collections.abc import Container

from attrs import frozen

from minfer.blocks.keys import Key, Keys, group_key, group_keys
from minfer.blocks.ownership import Transaction
from minfer.blocks.prefix import ROOT, bundles, lookup, pages_of
from minfer.blocks.window import outside, unreleased
from minfer.planning.prefix_hit import find_hit, readable_blocks
from minfer.planning.states import block_before_state, state_key
from minfer.records.config import EngineConfig
from minfer.records.messages import (
    FetchBlocks,
    Loading,
    Move,
    Reason,
    Recomputing,
    TransferCommand,
)
from minfer.records.sequence import Sequence
from minfer.records.state import EngineState
from minfer.records.tiers import BY_COST, LOAD, ChainRun, Tier, TransferKind
from minfer.values.record import evolve


@frozen
class PrefixLoad:
    """What was decided about the head of the queue."""

    state: EngineState
    reason: Reason | None = None  # None: it waits for a load that is in flight for others
    command: TransferCommand | None = None


@frozen
class _EitherKeys(Container[Key]):
    """The contents of the device and of a tier."""

    one: Container[Key]
    other: Container[Key]

    def __contains__(self, key: object) -> bool:
        return key in self.one or key in self.other


@frozen
class _EitherIndex:
    """The same, as an index that `find_hit` takes."""

    nodes: _EitherKeys


@frozen
class _Missing:
    """Consecutive blocks of a chain that the device lacks, behind one that it has; or the
    state of recurrent layers behind a block.
    """

    parent: Key
    keys: Keys
    size: int  # pages of a block


@frozen(kw_only=True)
class _Source:
    """A tier that has more of a prefix than the device."""

    tier: Tier
    kind: TransferKind
    blocks: int  # of the prefix, that a hit would have
    hit: int  # of these, that the device has
    runs: tuple[_Missing, ...]
    pages: int  # of all runs
    seconds: float  # to load them
    recompute: float  # to compute them instead

    def total(self, max_blocks: int) -> float:
        """Seconds of loading, and of computing the rest of `max_blocks`."""
        block_seconds = self.recompute / (self.blocks - self.hit)
        return self.seconds + (max_blocks - self.blocks) * block_seconds


def choose_source(
    config: EngineConfig, state: EngineState, seq: Sequence
) -> PrefixLoad | None:
    """Decide whether blocks are loaded for `seq`, the head of the queue, which can be
    admitted; None if no tier has more of its prefix, or nothing can be loaded now.
    """
    sources = _sources(config, state, seq)
    if not sources:
        return None
    longest = max(sources, key=lambda source: source.blocks)
    if (passed := _join_load_in_flight(state, seq, longest.runs)) is not None:
        return PrefixLoad(passed)
    best = _best(sources, longest.blocks)
    if best is None:
        waiting = state.waiting.remove(seq.place).insert(evolve(seq, chosen=True))
        return PrefixLoad(
            evolve(state, waiting=waiting), _reason(Recomputing, seq, longest)
        )
    load = _begin(config, state, seq, best)
    if load is None:
        return None
    state, command = load
    return PrefixLoad(state, _reason(Loading, seq, best), command)


def _reason(
    kind: type[Loading | Recomputing], seq: Sequence, source: _Source
) -> Loading | Recomputing:
    return kind(
        *seq.id, source.blocks, source.hit, source.seconds, source.recompute, source.kind
    )


def _best(sources: list[_Source], max_blocks: int) -> _Source | None:
    """The source that is expected to take the least time: of those whose tier is always
    loaded from, or, without any, of those that are faster than computing. Of equal ones,
    the one with more blocks, or host memory. None: everything is computed.
    """
    willing = [source for source in sources if source.tier.choice == LOAD] or [
        source
        for source in sources
        if source.tier.choice == BY_COST and source.seconds <= source.recompute
    ]
    return min(
        willing,
        key=lambda source: (source.total(max_blocks), -source.blocks),
        default=None,
    )


def _sources(config: EngineConfig, state: EngineState, seq: Sequence) -> list[_Source]:
    """The tiers that have more of the prefix of `seq` than the device has."""
    tiers, device = state.tiers, state.blocks.prefix
    contents = list[tuple[Tier, TransferKind, Container[Key]]]()
    if config.host is not None and tiers.host is not None and tiers.host.prefix.nodes:
        kind = TransferKind.LOAD_FROM_HOST
        contents.append((config.host, kind, tiers.host.prefix.nodes))
    if config.external_store is not None and tiers.external_keys:
        contents.append(
            (config.external_store, TransferKind.FETCH_FROM_EXTERNAL, tiers.external_keys)
        )
    if not contents:
        return []
    full = readable_blocks(seq, (len(seq.history) - 1) // config.block_size)
    hit = find_hit(config, device, seq.keys, full).blocks
    sources = list[_Source]()
    for tier, kind, keys in contents:
        contents_of_both = _EitherIndex(_EitherKeys(device.nodes, keys))
        end = full
        if kind is TransferKind.FETCH_FROM_EXTERNAL:
            end = _without_gap(config, contents_of_both, seq.keys, hit, full)
        blocks = find_hit(config, contents_of_both, seq.keys, end).blocks
        if blocks <= hit:
            continue
        runs = _missing(config, state, seq.keys, blocks)
        pages = sum(len(run.keys) * run.size for run in runs)
        # pages that are copied first
        before = sum(len(transfer.targets) for transfer in tiers.transfers_of(kind))
        sources.append(
            _Source(
                tier=tier,
                kind=kind,
                blocks=blocks,
                hit=hit,
                runs=runs,
                pages=pages,
                seconds=tier.load_seconds + (before + pages) * tier.page_seconds,
                recompute=(blocks - hit) * config.block_size * tier.token_seconds,
            )
        )
    return sources


def _without_gap(
    config: EngineConfig, contents: _EitherIndex, keys: Keys, hit: int, full: int
) -> int:
    """How many of the first `full` blocks are there without a gap behind the `hit` ones
    of the device: keys of the external store are forgotten one by one, parents' first.
    """
    g = config.full_group
    if g is None:
        return full
    end = hit
    while end < full and group_key(keys[end], g) in contents.nodes:
        end += 1
    return end


def _missing(
    config: EngineConfig, state: EngineState, keys: Keys, blocks: int
) -> tuple[_Missing, ...]:
    """What the device lacks for a hit of `blocks` blocks."""
    device, size = state.blocks.prefix, config.block_size
    missing = list[_Missing]()
    for g, group in enumerate(config.block_groups):
        low, sinks = outside(blocks * size, group.window, size), group.sink_blocks(size)
        own_keys, pages = (
            group_keys(unreleased(keys, 0, blocks, low, sinks), g),
            group.pages,
        )
        if group.window:
            lacks = [key for key in own_keys if key not in device.nodes]
            missing += [_Missing(ROOT, (key,), pages) for key in lacks]
            continue
        have = lookup(device, keys, blocks, g)
        if have < blocks:
            parent = own_keys[have - 1] if have else ROOT
            missing.append(_Missing(parent, own_keys[have:], pages))
    if config.state_group is not None:
        content = keys[blocks - 1]
        key, parent = state_key(config, content), block_before_state(config, content)
        if key not in device.nodes:
            missing.append(_Missing(parent, (key,), config.state_pages))
    return tuple(missing)


def _present(config: EngineConfig, state: EngineState, keys: Keys, blocks: int) -> Keys:
    """What the device has for a hit of `blocks` blocks, the last ones first: of a chain
    the deepest block, which keeps those before it; in a window each block.
    """
    device, size = state.blocks.prefix, config.block_size
    present = list[Key]()
    for g, group in enumerate(config.block_groups):
        if group.window:
            low, sinks = (
                outside(blocks * size, group.window, size),
                group.sink_blocks(size),
            )
            own_keys = group_keys(unreleased(keys, 0, blocks, low, sinks), g)
            present += [key for key in own_keys if key in device.nodes]
        elif have := lookup(device, keys, blocks, g):
            present.append(group_key(keys[have - 1], g))
    if config.state_group is not None:
        key = state_key(config, keys[blocks - 1])
        present += [key] if key in device.nodes else []
    return tuple(present[::-1])


def _join_load_in_flight(
    state: EngineState, seq: Sequence, runs: tuple[_Missing, ...]
) -> EngineState | None:
    """Let `seq` wait for a load in flight that moves a block of these, if there is
    one.
    """
    keys = {key for run in runs for key in run.keys}
    for index, transfer in enumerate(state.tiers.transfers):
        if transfer.kind.to_device and not keys.isdisjoint(transfer.keys):
            transfers = [*state.tiers.transfers]
            transfers[index] = evolve(
                transfer, waiting=transfer.waiting | {seq.request.id}
            )
            tiers = evolve(state.tiers, transfers=tuple(transfers))
            return evolve(state, tiers=tiers)
    return None


def _begin(
    config: EngineConfig, state: EngineState, seq: Sequence, source: _Source
) -> tuple[EngineState, TransferCommand] | None:
    """Begin a transfer of a source's blocks to the device, where the others of the hit
    are held. None if there are no pages for them, or if a plan in flight still copies
    from one of these pages: plans are executed in order, but a transfer does not wait for
    them.
    """
    device, host = Transaction(state.blocks), state.tiers.host
    held_parents = _present(config, state, seq.keys, source.blocks)
    for key in held_parents:  # before anything is evicted
        device.prefix.hold(key)
    allocated = device.take(source.pages)
    copied = {copy.source for plan in state.inflight for copy in plan.copies}
    if allocated is None or not copied.isdisjoint(allocated.pages):
        return None
    first, paths = 0, list[ChainRun]()
    for run in source.runs:
        end = first + run.size * len(run.keys)
        pages = (*bundles(allocated.pages[first:end], run.size),)
        paths.append(ChainRun(run.parent, run.keys, pages))
        first = end
    if host is not None and source.kind is TransferKind.LOAD_FROM_HOST:
        tier = Transaction(host)
        for run in source.runs:
            tier.prefix.hold(run.keys[-1])
        host = tier.done()
    tiers = state.tiers.with_transfer(host, paths, held_parents, source.kind, seq.id)
    now = evolve(state, blocks=device.done(), tiers=tiers)
    transfer = tiers.transfers[-1]
    if host is None or source.kind is TransferKind.FETCH_FROM_EXTERNAL:
        blocks = tuple([pages for path in paths for pages in path.pages])
        return now, FetchBlocks(transfer.number, transfer.keys, blocks)
    read = pages_of(host.prefix, transfer.keys)
    return now, Move(transfer.number, source.kind, read, transfer.targets)

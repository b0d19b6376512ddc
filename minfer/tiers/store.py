"""Stores blocks of the device in tiers as soon as they are published.

A block is stored behind its parent, as tiers keep the beginnings of prefixes: host memory
evicts leaves first. If its parent was evicted there, or never stored, the parent is
stored with it, as long as the device has it.
"""

from collections.abc import Container

from attrs import define, field, frozen

from minfer.blocks.keys import DIGEST, TAIL, Key, Keys, is_state
from minfer.blocks.ownership import Blocks, Transaction
from minfer.blocks.prefix import (
    ROOT,
    Pages,
    PrefixIndex,
    bundles,
    count_evictable,
    flattened,
    pages_of,
)
from minfer.records.config import EngineConfig
from minfer.records.messages import Move, StoreBlocks
from minfer.records.state import EngineState, Transition
from minfer.records.tiers import ChainRun, Tiers, Transfer, TransferKind
from minfer.values.queue import Queue
from minfer.values.record import evolve


def store_blocks(config: EngineConfig, state: EngineState) -> Transition:
    """Begin to store published blocks, as many as may be on their way at once."""
    tiers, prefix = state.tiers, state.blocks.prefix
    new = prefix.unstored or ()
    if not (new or tiers.host_queue or tiers.external_queue):
        return Transition(state)
    device = Transaction(state.blocks)
    if new:
        device.prefix.unstored = ()
    tiers, move = _store_in_host(config, prefix, device, tiers, new)
    tiers, store = _store_in_external(config, prefix, device, tiers, new)
    commands = tuple([command for command in (move, store) if command is not None])
    return Transition(evolve(state, blocks=device.done(), tiers=tiers), commands)


@define
class _Run:
    """Consecutive blocks of a chain, parents first. Never kept, never shared."""

    parent: Key
    keys: list[Key]
    blocks: list[Pages]  # of the device


@define
class _Batch:
    """The next blocks to be stored in a tier. Never kept, never shared."""

    prefix: PrefixIndex  # of the device
    there: Container[Key]  # what the tier has
    room: int  # pages that may be moved
    taken: set[Key]  # on their way there, or in `runs`
    runs: list[_Run] = field(factory=list)

    @classmethod
    def of(
        cls,
        prefix: PrefixIndex,
        contents: Container[Key],
        room: int,
        stores: list[Transfer],
    ) -> "_Batch":
        """An empty batch for a tier, to which these transfers are in flight."""
        return cls(
            prefix, contents, room, {key for transfer in stores for key in transfer.keys}
        )

    def collect(self, queue: Queue[Key]) -> Queue[Key]:
        """Collect blocks as far as there is room; returns those of the queue that are
        left.
        """
        for index, key in enumerate(queue):
            for run in self._runs(key):
                num_blocks, size = len(run.keys), len(run.blocks[0])
                fits = min(num_blocks, self.room // size)
                if fits < num_blocks:
                    run = _Run(run.parent, run.keys[:fits], run.blocks[:fits])
                if fits:
                    self._append(run)
                    self.room -= fits * size
                if fits < num_blocks:
                    return queue.without_first(index)
        return Queue()

    def _runs(self, key: Key) -> list[_Run]:
        """What the tier lacks of a block and those before it, as `_missing`; and of a
        state of recurrent layers, which is a run of its own behind its block.
        """
        if not self._is_state(key):
            run = self._missing(key)
            return [] if run is None else [run]
        packed = self.prefix.nodes.get(key)
        if packed is None or key in self.taken or key in self.there:
            return []
        pages, parent, *_ = packed
        return [*self._runs(parent), _Run(parent, [key], [pages])]

    def _is_state(self, key: Key) -> bool:
        return is_state(key, self.prefix.state_group)

    def _missing(self, key: Key) -> _Run | None:
        """The block and those before it that the tier lacks, also after the transfers in
        flight. None if it lacks none, or if the device has evicted one of them, as the
        tier would have no use for those after it.
        """
        keys, blocks = list[Key](), list[Pages]()
        while key != ROOT and key not in self.taken and key not in self.there:
            packed = self.prefix.nodes.get(key)
            if packed is None or (len(key) > DIGEST and _is_partial(key)):
                return None
            keys.append(key)
            blocks.append(packed[0])
            key = packed[1]
        return _Run(key, keys[::-1], blocks[::-1]) if keys else None

    def _append(self, run: _Run) -> None:
        """Add blocks, to the last run if they go on there."""
        last = self.runs[-1] if self.runs else None
        follows = last is not None and last.keys[-1] == run.parent
        if last is not None and follows and not self._is_state(run.keys[0]):
            last.keys += run.keys
            last.blocks += run.blocks
        else:
            self.runs.append(run)
        self.taken.update(run.keys)


def _is_partial(key: Key) -> bool:
    """Whether a key that is longer than a digest is of a partial block: numbers of groups
    are below the mark of such a key.
    """
    return len(key) > DIGEST + 1 or key.startswith(TAIL)


# --- host memory ------------------------------------------------------------------------


def _store_in_host(
    config: EngineConfig,
    prefix: PrefixIndex,
    device: Transaction,
    tiers: Tiers,
    new: Keys,
) -> tuple[Tiers, Move | None]:
    """Begin to store the first blocks of the queue, to which `new` ones are added."""
    host = tiers.host
    if config.host is None or host is None:
        return tiers, None
    # Earlier ones than that were evicted since, or are stored with their children.
    queue = tiers.host_queue.extended(new, config.num_blocks)
    if not queue:
        return tiers, None
    stores, contents = tiers.transfers_of(TransferKind.STORE_TO_HOST), host.prefix.nodes
    room = config.host.storing - sum(len(transfer.targets) for transfer in stores)
    batch = _Batch.of(prefix, contents, room, stores)
    remaining, needed = batch.collect(queue), room - batch.room
    if host.free < needed:
        short = needed - host.free
        available = host.free + count_evictable(host.prefix, host.prefix.idle, short)
        if available < needed:
            batch = _Batch.of(prefix, contents, available, stores)
            remaining = batch.collect(queue)
    tiers = evolve(tiers, host_queue=remaining)
    return _begin(device, tiers, host, batch.runs)


def _begin(
    device: Transaction, tiers: Tiers, host: Blocks, runs: list[_Run]
) -> tuple[Tiers, Move | None]:
    """Begin a transfer of these runs to host memory, which has room for nearly all."""
    tier, contents = Transaction(host), host.prefix.nodes
    held_parents = tuple([run.parent for run in runs if run.parent in contents])
    for key in held_parents:  # before anything is evicted there
        tier.prefix.hold(key)
    sources, paths, missed = list[Pages](), list[ChainRun](), list[Key]()
    for run in runs:
        size = len(run.blocks[0])
        allocated = tier.take(len(run.blocks) * size)
        if allocated is None:  # the parent is held, and no longer makes room
            missed.append(run.keys[-1])
            continue
        device.prefix.pin(run.keys[-1])
        sources += run.blocks
        pages = (*bundles(allocated.pages, size),)
        paths.append(ChainRun(run.parent, tuple(run.keys), pages))
    if not paths:
        return tiers, None
    for key in missed:  # they were used now, as those that are stored
        device.prefix.hold(key)
        device.prefix.release(key)
    kind = TransferKind.STORE_TO_HOST
    tiers = tiers.with_transfer(tier.done(), paths, held_parents, kind)
    transfer = tiers.transfers[-1]
    move = Move(transfer.number, kind, flattened(sources), transfer.targets)
    return tiers, move


# --- the external store -----------------------------------------------------------------


@frozen
class _Except(Container[Key]):
    """All but some keys."""

    some: Container[Key]

    def __contains__(self, key: object) -> bool:
        return key not in self.some


def _store_in_external(
    config: EngineConfig,
    prefix: PrefixIndex,
    device: Transaction,
    tiers: Tiers,
    new: Keys,
) -> tuple[Tiers, StoreBlocks | None]:
    """Begin to store the first blocks of the queue, to which `new` ones are added."""
    if config.external_store is None:
        return tiers, None
    push_only = config.external_store.push_only
    if push_only:
        new = tuple([key for key in new if key in tiers.push_keys])
    queue = tiers.external_queue.extended(new, config.num_blocks)
    if not queue:
        return tiers, None
    stores = tiers.transfers_of(TransferKind.STORE_TO_EXTERNAL)
    moving = sum(len(pages_of(prefix, transfer.keys)) for transfer in stores)
    contents = _Except(tiers.push_keys) if push_only else tiers.external_keys
    batch = _Batch.of(prefix, contents, config.external_store.storing - moving, stores)
    tiers = evolve(tiers, external_queue=batch.collect(queue))
    if not batch.runs:
        return tiers, None
    paths = list[ChainRun]()
    for run in batch.runs:
        device.prefix.pin(run.keys[-1])
        paths.append(ChainRun(run.parent, tuple(run.keys), ()))
    tiers = tiers.with_transfer(tiers.host, paths, (), StoreBlocks.kind)
    transfer = tiers.transfers[-1]
    if push_only:
        tiers = evolve(tiers, push_keys=tiers.push_keys.discard(transfer.keys))
    pages = tuple([block for run in batch.runs for block in run.blocks])
    return tiers, StoreBlocks(transfer.number, transfer.keys, pages)

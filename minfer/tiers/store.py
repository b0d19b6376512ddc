"""Stores blocks of the device in tiers as soon as they are published, so that the device
can evict them at any time.

A block is stored behind its parent, as tiers keep the beginnings of prefixes: host memory
evicts leaves first. If its parent was evicted there, or never stored, the parent is
stored with it, as long as the device has it.
"""

from collections.abc import Container

from attrs import define, field, frozen

from minfer.blocks.keys import DIGEST, TAIL, Key, Keys
from minfer.blocks.ownership import Blocks, Transaction
from minfer.blocks.prefix import (
    ROOT,
    Pages,
    PrefixIndex,
    bundles,
    flattened,
    node_of,
    pages_of,
)
from minfer.records.config import EngineConfig
from minfer.records.messages import Move, StoreBlocks
from minfer.records.state import EngineState, Transition
from minfer.records.tiers import ChainRun, Transfer
from minfer.values.record import evolve


def store_blocks(config: EngineConfig, state: EngineState) -> Transition:
    """Begin to store published blocks, as many as may be on their way at once."""
    state = _queue(config, state)
    in_host = _store_in_host(config, state)
    by_key = _store_by_key(config, in_host.state)
    return Transition(by_key.state, in_host.commands + by_key.commands)


def _queue(config: EngineConfig, state: EngineState) -> EngineState:
    """Add newly published blocks to the queue of each tier."""
    tiers, prefix = state.tiers, state.blocks.prefix
    if not prefix.unstored:
        return state
    # Earlier ones than that were evicted since, or are stored with their children.
    most, new = config.num_blocks, prefix.unstored
    if config.host is not None:
        tiers = evolve(tiers, unstored=(tiers.unstored + new)[-most:])
    if config.keyed is not None:
        if config.keyed.sends:
            new = tuple([key for key in new if key in tiers.wanted])
        tiers = evolve(tiers, unsaved=(tiers.unsaved + new)[-most:])
    blocks = evolve(state.blocks, prefix=evolve(prefix, unstored=()))
    return evolve(state, blocks=blocks, tiers=tiers)


@define
class _Batch:
    """The next blocks to be stored in a tier. Never kept, never shared."""

    prefix: PrefixIndex  # of the device
    there: Container[Key]  # what the tier has
    room: int  # pages that may be moved
    taken: set[Key]  # on their way there, or in `paths`
    paths: list[list[Key]] = field(factory=list)  # each a run of a chain, parents first

    @classmethod
    def of(
        cls,
        prefix: PrefixIndex,
        there: Container[Key],
        room: int,
        stores: list[Transfer],
    ) -> "_Batch":
        """An empty batch for a tier, to which these transfers are in flight."""
        return cls(prefix, there, room, {key for one in stores for key in one.keys})

    def collect(self, queue: Keys) -> Keys:
        """Collect blocks as far as there is room; returns those of the queue that are
        left.
        """
        for at, key in enumerate(queue):
            chain = self._missing(key)
            size = len(self.prefix.nodes[key][0]) if chain else 0
            some = chain[: self.room // size] if size else []
            self._append(some)
            self.room -= len(some) * size
            if len(some) < len(chain):
                return queue[at:]
        return ()

    def _missing(self, key: Key) -> list[Key]:
        """The block and those before it that the tier lacks, also after the transfers in
        flight; parents first. Empty if the device has evicted one of them, as the tier
        would have no use for those after it.
        """
        found = list[Key]()
        while key != ROOT and key not in self.taken and key not in self.there:
            node = node_of(self.prefix, key)
            if node is None or _is_partial(key):
                return []
            found.append(key)
            key = node.parent
        return found[::-1]

    def _append(self, chain: list[Key]) -> None:
        """Add consecutive blocks, to the last path if they go on there."""
        if not chain:
            return
        parent = self.prefix.nodes[chain[0]][1]
        if self.paths and self.paths[-1][-1] == parent:
            self.paths[-1] += chain
        else:
            self.paths.append([*chain])
        self.taken.update(chain)


def _is_partial(key: Key) -> bool:
    """Whether a key, of any group, is of a partial block: numbers of groups are below the
    mark of such a key.
    """
    return len(key) > DIGEST + 1 or (len(key) > DIGEST and key.startswith(TAIL))


# --- host memory ------------------------------------------------------------------------


def _store_in_host(config: EngineConfig, state: EngineState) -> Transition:
    tiers, host = state.tiers, state.tiers.host
    if config.host is None or host is None or not tiers.unstored:
        return Transition(state)
    stores = tiers.stores(keyed=False)
    moving = sum(len(one.targets) for one in stores)
    room = min(config.host.storing - moving, host.available)
    batch = _Batch.of(state.blocks.prefix, host.prefix.nodes, room, stores)
    rest = batch.collect(tiers.unstored)
    state = evolve(state, tiers=evolve(tiers, unstored=rest))
    return _begin(state, host, batch.paths) if batch.paths else Transition(state)


def _begin(state: EngineState, host: Blocks, chains: list[list[Key]]) -> Transition:
    """Begin a transfer of these runs to host memory, which has room for nearly all."""
    device, tier = Transaction(state.blocks), Transaction(host)
    prefix = state.blocks.prefix
    parents = [prefix.nodes[chain[0]][1] for chain in chains]
    held_parents = tuple([key for key in parents if key in host.prefix.nodes])
    for key in held_parents:  # before anything is evicted there
        tier.prefix.hold(key)
    sources, paths = list[Pages](), list[ChainRun]()
    for parent, chain in zip(parents, chains, strict=True):
        device.prefix.hold(chain[-1])
        own = [prefix.nodes[key][0] for key in chain]
        taken = tier.take(sum(map(len, own)))
        if taken is None:  # the parent is held, and no longer makes room
            device.prefix.release(chain[-1])
            continue
        sources += own
        paths.append(
            ChainRun(parent, tuple(chain), (*bundles(taken.pages, len(own[0])),))
        )
    if not paths:
        return Transition(state)
    tiers = state.tiers.with_transfer(
        tier.done(), paths, held_parents, loads=False, keyed=False
    )
    transfer = tiers.transfers[-1]
    state = evolve(state, blocks=device.done(), tiers=tiers)
    move = Move(transfer.number, False, flattened(sources), transfer.targets)
    return Transition(state, (move,))


# --- the keyed tier ---------------------------------------------------------------------


@frozen
class _Except(Container[Key]):
    """All but some keys."""

    some: Container[Key]

    def __contains__(self, key: object) -> bool:
        return key not in self.some


def _store_by_key(config: EngineConfig, state: EngineState) -> Transition:
    tiers, prefix = state.tiers, state.blocks.prefix
    if config.keyed is None or not tiers.unsaved:
        return Transition(state)
    stores = tiers.stores(keyed=True)
    moving = sum(len(pages_of(prefix, one.keys)) for one in stores)
    there = _Except(tiers.wanted) if config.keyed.sends else tiers.known
    batch = _Batch.of(prefix, there, config.keyed.storing - moving, stores)
    rest = batch.collect(tiers.unsaved)
    tiers = evolve(tiers, unsaved=rest)
    if not batch.paths:
        return Transition(evolve(state, tiers=tiers))
    device, paths = Transaction(state.blocks), list[ChainRun]()
    for chain in batch.paths:
        device.prefix.hold(chain[-1])
        paths.append(ChainRun(prefix.nodes[chain[0]][1], tuple(chain), ()))
    tiers = tiers.with_transfer(tiers.host, paths, (), loads=False, keyed=True)
    if config.keyed.sends:
        tiers = evolve(tiers, wanted=tiers.wanted.discard(tiers.transfers[-1].keys))
    transfer = tiers.transfers[-1]
    pages = tuple([prefix.nodes[key][0] for key in transfer.keys])
    store = StoreBlocks(transfer.number, transfer.keys, pages)
    return Transition(evolve(state, blocks=device.done(), tiers=tiers), (store,))

"""Stores: copies published blocks of the device to the host tier, as soon as they are
published, so that the device can evict them at any time.

A block is stored behind its parent, as the tier evicts leaves first: of a prefix that the
tier keeps, it keeps the beginning. If its parent was evicted there, or never stored, the
parent is stored with it, as long as the device has it.
"""

from attrs import define, field

from minfer.blocks.keys import DIGEST, TAIL, Key, Keys
from minfer.blocks.ownership import Blocks, Transaction
from minfer.blocks.prefix import ROOT, Pages, bundles, flattened, node_of
from minfer.records.config import EngineConfig
from minfer.records.messages import Move
from minfer.records.state import EngineState, Transition
from minfer.records.tiers import ChainRun, Tiers
from minfer.values.record import evolve


def store_blocks(config: EngineConfig, state: EngineState) -> Transition:
    """Begin to store published blocks, as many as may be on their way at once."""
    tiers, prefix, host = state.tiers, state.blocks.prefix, state.tiers.host
    if config.host is None or host is None:
        return Transition(state)
    if prefix.unstored:
        # What came long ago was evicted since, or is stored with what follows it.
        every = tiers.unstored + prefix.unstored
        tiers = evolve(tiers, unstored=every[-config.num_blocks :])
        blocks = evolve(state.blocks, prefix=evolve(prefix, unstored=()))
        state = evolve(state, blocks=blocks, tiers=tiers)
    if not tiers.unstored:
        return Transition(state)
    moving = sum(len(one.targets) for one in tiers.transfers if not one.loads)
    room = min(config.host.storing - moving, host.available)
    batch = _Batch(state.blocks, tiers, host, room)
    rest = batch.collect()
    state = evolve(state, tiers=evolve(tiers, unstored=rest))
    return _begin(state, host, batch.paths) if batch.paths else Transition(state)


@define
class _Batch:
    """The next blocks to be stored. Never kept, never shared."""

    blocks: Blocks  # of the device
    tiers: Tiers
    host: Blocks
    room: int  # pages that may be written
    paths: list[list[Key]] = field(factory=list)  # each a run of a chain, parents first
    taken: set[Key] = field(init=False)  # on their way, or in `paths`

    def __attrs_post_init__(self) -> None:
        stores = (one for one in self.tiers.transfers if not one.loads)
        self.taken = {key for one in stores for key in one.keys}

    def collect(self) -> Keys:
        """Collect blocks as far as there is room; returns those that are left."""
        every = self.tiers.unstored
        for at, key in enumerate(every):
            chain = self._missing(key)
            size = len(self.blocks.prefix.nodes[key][0]) if chain else 0
            some = chain[: self.room // size] if size else []
            self._append(some)
            self.room -= len(some) * size
            if len(some) < len(chain):
                return every[at:]
        return ()

    def _missing(self, key: Key) -> list[Key]:
        """The block and those before it that the tier has not, and will not have after
        transfers in flight; parents first.
        """
        found, prefix = list[Key](), self.blocks.prefix
        while key != ROOT and key not in self.taken and key not in self.host.prefix.nodes:
            node = node_of(prefix, key)
            if node is None or _is_partial(key):
                break
            found.append(key)
            key = node.parent
        return found[::-1]

    def _append(self, chain: list[Key]) -> None:
        """Add consecutive blocks, to the last path if they go on there."""
        if not chain:
            return
        parent = self._parent(chain[0])
        if self.paths and parent != ROOT and self.paths[-1][-1] == parent:
            self.paths[-1] += chain
        else:
            self.paths.append([*chain])
        self.taken.update(chain)

    def _parent(self, key: Key) -> Key:
        return self.blocks.prefix.nodes[key][1]


def _is_partial(key: Key) -> bool:
    """Whether a key, of any group, is of a partial block: numbers of groups are below the
    mark of such a key.
    """
    return len(key) > DIGEST + 1 or (len(key) > DIGEST and key.startswith(TAIL))


def _begin(state: EngineState, host: Blocks, chains: list[list[Key]]) -> Transition:
    """Begin a transfer of these runs of chains to the host tier, which has the room."""
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
    tiers = state.tiers.with_transfer(tier.done(), paths, held_parents, loads=False)
    transfer = tiers.transfers[-1]
    state = evolve(state, blocks=device.done(), tiers=tiers)
    move = Move(transfer.number, False, flattened(sources), transfer.targets)
    return Transition(state, (move,))

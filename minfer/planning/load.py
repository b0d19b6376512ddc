"""Loads: the cached blocks of a waiting sequence come from the host tier.

The head of the queue is asked when there is room to admit it. If its prefix goes on in
the host tier, and loading is expected to be faster than computing, the blocks are loaded
into pages of the device, and the sequence is passed over until they have come. It is then
admitted with a hit, as if its prefix had always been there. This happens once while it
waits: what is evicted meanwhile, or was lost, is computed.
"""

from collections.abc import Container

from attrs import frozen

from minfer.blocks.keys import Key, Keys, group_keys
from minfer.blocks.ownership import Transaction
from minfer.blocks.prefix import ROOT, bundles, lookup, pages_of
from minfer.blocks.window import kept, outside
from minfer.planning.prefix_hit import find_hit, readable_blocks
from minfer.records.config import EngineConfig
from minfer.records.messages import Loading, Move, Reason, Recomputing
from minfer.records.sequence import Sequence
from minfer.records.state import EngineState
from minfer.records.tiers import BY_COST, RECOMPUTE, ChainRun, HostTier
from minfer.values.pmap import Map
from minfer.values.record import evolve


@frozen
class Load:
    """What was decided about the head of the queue."""

    state: EngineState
    reason: Reason | None = None  # None: some of its blocks are on their way for others
    move: Move | None = None


@frozen
class _EitherKeys(Container[Key]):
    """The contents of two indexes."""

    one: Map[Key, tuple[object, ...]]
    other: Map[Key, tuple[object, ...]]

    def __contains__(self, key: object) -> bool:
        return key in self.one or key in self.other


@frozen
class _EitherIndex:
    nodes: _EitherKeys


def choose_source(config: EngineConfig, state: EngineState, seq: Sequence) -> Load | None:
    """Decide whether blocks are loaded for `seq`, the head of the queue, which can be
    admitted; None if there is no choice.
    """
    tier, host = config.host, state.tiers.host
    if tier is None or host is None or seq.chosen or not host.prefix.nodes:
        return None
    full = readable_blocks(seq, (len(seq.history) - 1) // config.block_size)
    device = state.blocks.prefix
    hit = find_hit(config, device, seq.keys, full).blocks
    both = _EitherIndex(_EitherKeys(device.nodes, host.prefix.nodes))
    blocks = find_hit(config, both, seq.keys, full).blocks
    if blocks <= hit:
        return None
    paths = _missing(config, state, seq.keys, blocks)
    if (passed := _join_load_in_flight(state, seq, paths)) is not None:
        return Load(passed)
    count = sum(
        len(host.prefix.nodes[key][0]) for _, keys in paths for key in keys
    )  # pages
    loads = (one for one in state.tiers.transfers if one.loads)
    before = sum(len(one.targets) for one in loads)  # pages that are copied first
    seconds = tier.load_seconds + (before + count) * tier.page_seconds
    recompute = (blocks - hit) * config.block_size * tier.token_seconds
    if not _loads(tier, seconds, recompute):
        waiting = state.waiting.remove(seq.place).insert(evolve(seq, chosen=True))
        chosen = Recomputing(*seq.id, blocks, hit, seconds, recompute)
        return Load(evolve(state, waiting=waiting), chosen)
    load = _begin(state, seq, paths, count)
    if load is None:
        return None
    state, move = load
    return Load(state, Loading(*seq.id, blocks, hit, seconds, recompute), move)


def _loads(tier: HostTier, seconds: float, recompute: float) -> bool:
    if tier.choice == BY_COST:
        return seconds <= recompute
    return tier.choice != RECOMPUTE


def _missing(
    config: EngineConfig, state: EngineState, keys: Keys, blocks: int
) -> list[tuple[Key, Keys]]:
    """What the device lacks for a hit of so many blocks: runs of a chain, each after its
    parent, which it has.
    """
    device, size = state.blocks.prefix, config.block_size
    found = list[tuple[Key, Keys]]()
    for g, group in enumerate(config.groups):
        low, sinks = outside(blocks * size, group.window, size), group.sink_blocks(size)
        own = group_keys(kept(keys, 0, blocks, low, sinks), g)
        if group.window:
            found += [(ROOT, (key,)) for key in own if key not in device.nodes]
            continue
        have = lookup(device, keys, blocks, g)
        if have < blocks:
            found.append((own[have - 1] if have else ROOT, own[have:]))
    return found


def _join_load_in_flight(
    state: EngineState, seq: Sequence, chains: list[tuple[Key, Keys]]
) -> EngineState | None:
    """Let `seq` wait for a load in flight that moves a block of these, if there is
    one.
    """
    wanted = {key for _, keys in chains for key in keys}
    for at, one in enumerate(state.tiers.transfers):
        if one.loads and not wanted.isdisjoint(one.keys):
            transfers = [*state.tiers.transfers]
            transfers[at] = evolve(one, waiting=one.waiting | {seq.request.id})
            tiers = evolve(state.tiers, transfers=tuple(transfers))
            return evolve(state, tiers=tiers)
    return None


def _begin(
    state: EngineState, seq: Sequence, chains: list[tuple[Key, Keys]], count: int
) -> tuple[EngineState, Move] | None:
    """Begin a transfer of these runs of chains to the device; None if there are no
    `count` pages for them, or a plan in flight still copies from one of these: plans
    follow each other on the device, and transfers do not follow plans.
    """
    host = state.tiers.host
    if host is None:
        return None
    device, tier = Transaction(state.blocks), Transaction(host)
    held_parents = tuple([parent for parent, _ in chains if parent != ROOT])
    for key in held_parents:  # before anything is evicted
        device.prefix.hold(key)
    taken = device.take(count)
    copied = {copy.source for plan in state.inflight for copy in plan.copies}
    if taken is None or not copied.isdisjoint(taken.pages):
        return None
    at, paths = 0, list[ChainRun]()
    for parent, keys in chains:
        tier.prefix.hold(keys[-1])
        each = len(host.prefix.nodes[keys[0]][0])
        end = at + each * len(keys)
        paths.append(ChainRun(parent, keys, (*bundles(taken.pages[at:end], each),)))
        at = end
    tiers = state.tiers.with_transfer(
        tier.done(), paths, held_parents, loads=True, sample=seq.id
    )
    transfer = tiers.transfers[-1]
    sources = pages_of(host.prefix, transfer.keys)
    state = evolve(state, blocks=device.done(), tiers=tiers)
    return state, Move(transfer.number, True, sources, transfer.targets)

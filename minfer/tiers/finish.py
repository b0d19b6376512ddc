"""The end of a transfer: its blocks are published where they went, or its pages are free
again. What it held is released in both cases.
"""

from minfer.blocks.ownership import Blocks, Transaction
from minfer.blocks.prefix import ROOT, flattened
from minfer.records.config import EngineConfig
from minfer.records.messages import Lost, LostBlocks, Moved, clip
from minfer.records.sequence import SampleId
from minfer.records.state import EngineState, Transition, ignore, waiting_sample
from minfer.records.tiers import KnownKeys, Tiers, Transfer
from minfer.records.waiting import WaitingQueue
from minfer.values.queue import Queue
from minfer.values.record import evolve


def finish_transfer(
    config: EngineConfig, state: EngineState, event: Moved | Lost
) -> Transition:
    """Apply the report of a transfer; one that is not in flight is ignored."""
    tiers, number = state.tiers, event.number if type(event.number) is int else None
    found = [one for one in tiers.transfers if one.number == number]
    if not found:
        return ignore(state, "transfer", f"{clip(event.number)} is not in flight")
    [transfer], lost = found, isinstance(event, Lost)
    device, host = state.blocks, tiers.host
    if transfer.loads:
        device = _write(device, transfer, lost=lost)
    else:
        device = _release(device, transfer)
    if host is not None and not transfer.keyed:
        if transfer.loads:
            host = _release(host, transfer)
        else:
            host = _write(host, transfer, lost=lost)
    tiers = evolve(
        tiers,
        host=host,
        known=_known(config, tiers.known, transfer, lost=lost),
        transfers=tuple([one for one in tiers.transfers if one is not transfer]),
    )
    if not transfer.loads:
        after = _without_queue if lost else _with_wanted_again
        tiers = after(config, tiers, transfer)
    waiting = _stop_choosing(state, transfer.sample)
    state = evolve(state, blocks=device, waiting=waiting, tiers=tiers)
    if isinstance(event, Moved):
        return Transition(state)
    lost_blocks = LostBlocks(len(transfer.keys), clip(event.error), transfer.keyed)
    return Transition(state, (), (lost_blocks,))


def _with_wanted_again(config: EngineConfig, tiers: Tiers, transfer: Transfer) -> Tiers:
    """These tiers after a store that has ended: what a request wanted sent to another
    engine, while it was on its way to one, is to be sent again.
    """
    if not (transfer.keyed and tiers.wanted):
        return tiers
    again = tuple([key for key in transfer.keys if key in tiers.wanted])
    return evolve(tiers, unsaved=tiers.unsaved.extended(again, config.num_blocks))


def _without_queue(_: EngineConfig, tiers: Tiers, transfer: Transfer) -> Tiers:
    """These tiers after a store that failed: what waits for it would fail, too, or have
    the lost blocks stored again and again. What is published from now on is stored.
    """
    if transfer.keyed:
        return evolve(tiers, unsaved=Queue())
    return evolve(tiers, unstored=Queue())


def _known(
    config: EngineConfig, known: KnownKeys, transfer: Transfer, *, lost: bool
) -> KnownKeys:
    """What the keyed tier is believed to have after a transfer."""
    if config.keyed is None or not transfer.keyed:
        return known
    if transfer.loads:
        return known.discard(transfer.keys) if lost else known
    if lost or config.keyed.sends:
        return known
    return known.add(transfer.keys, config.keyed.known)


def _write(target: Blocks, transfer: Transfer, *, lost: bool) -> Blocks:
    """The index that a transfer wrote to, with its blocks; if they were lost, without."""
    change = Transaction(target)
    for path in transfer.paths:
        broken = path.parent != ROOT and path.parent not in change.prefix.nodes
        if lost or broken:
            change.pool.release(flattened(path.pages))
            continue
        if change.prefix.held is not None:  # blocks are stored only if it lacks them
            change.prefix.add_idle(path.parent, path.keys, path.pages)
            continue
        # Held for its children, which are held until they are idle.
        if path.parent != ROOT:
            change.prefix.hold(path.parent)
        leaf, twins = change.prefix.publish(path.parent, path.keys, path.pages)
        change.pool.release(flattened(twins))
        change.prefix.release(leaf)
    for key in transfer.held_parents:
        change.prefix.release(key)
    return change.done()


def _release(source: Blocks, transfer: Transfer) -> Blocks:
    """The index that a transfer read, without what it held: a load holds blocks, and a
    store pins them.
    """
    change = Transaction(source)
    release = change.prefix.release if transfer.loads else change.prefix.unpin
    for key in transfer.held_leaves:
        release(key)
    return change.done()


def _stop_choosing(state: EngineState, sample: SampleId | None) -> WaitingQueue:
    """The queue after a transfer for `sample`: if that still waits, it does not choose
    again where its blocks come from.
    """
    waiting = state.waiting
    seq = None if sample is None else waiting_sample(state, sample)
    if seq is None:
        return waiting
    return waiting.remove(seq.place).insert(evolve(seq, chosen=True))

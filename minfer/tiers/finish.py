"""The end of a transfer: its blocks are published where they went, or its pages are free
again. What it held is released in both cases.
"""

from minfer.blocks.keys import Key, Keys, is_state
from minfer.blocks.ownership import Blocks, Transaction
from minfer.blocks.prefix import ROOT, flattened
from minfer.records.config import EngineConfig
from minfer.records.messages import Lost, LostBlocks, Moved, clip
from minfer.records.sequence import SampleId
from minfer.records.state import EngineState, Transition, ignore, waiting_sample
from minfer.records.tiers import Tiers, Transfer, TransferKind
from minfer.records.waiting import WaitingQueue
from minfer.values.queue import Queue
from minfer.values.record import evolve


def finish_transfer(
    config: EngineConfig, state: EngineState, event: Moved | Lost
) -> Transition:
    """Apply the report of a transfer; one that is not in flight is ignored."""
    tiers, number = state.tiers, event.number if type(event.number) is int else None
    ended = [
        in_progress for in_progress in tiers.transfers if in_progress.number == number
    ]
    if not ended:
        return ignore(state, "transfer", f"{clip(event.number)} is not in flight")
    [transfer], lost = ended, isinstance(event, Lost)
    if transfer.kind.to_device:
        device = _write(state.blocks, transfer, lost=lost)
    else:
        device = _release(state.blocks, transfer)
    in_flight = tuple(
        [in_progress for in_progress in tiers.transfers if in_progress is not transfer]
    )
    tiers = evolve(_after(config, tiers, transfer, lost=lost), transfers=in_flight)
    waiting = _stop_choosing(state, transfer.sample)
    state = evolve(state, blocks=device, waiting=waiting, tiers=tiers)
    if isinstance(event, Moved):
        return Transition(state)
    lost_blocks = LostBlocks(len(transfer.keys), clip(event.error), transfer.kind)
    return Transition(state, (), (lost_blocks,))


def _after(
    config: EngineConfig, tiers: Tiers, transfer: Transfer, *, lost: bool
) -> Tiers:
    """What is in the tiers after a transfer, and what is still to be stored there."""
    host = tiers.host
    match transfer.kind:
        case TransferKind.STORE_TO_HOST:
            host = None if host is None else _write(host, transfer, lost=lost)
            # What waits for a store that failed would fail, too, or have the lost blocks
            # stored again and again. What is published from now on is stored.
            queue = Queue[Key]() if lost else tiers.host_queue
            return evolve(tiers, host=host, host_queue=queue)
        case TransferKind.LOAD_FROM_HOST:
            host = None if host is None else _release(host, transfer)
            return evolve(tiers, host=host)
        case TransferKind.STORE_TO_EXTERNAL if lost:
            return evolve(tiers, external_queue=Queue())  # as above
        case TransferKind.STORE_TO_EXTERNAL:
            return _after_external_store(config, tiers, transfer.keys)
        case TransferKind.FETCH_FROM_EXTERNAL:
            keys = tiers.external_keys
            keys = keys.discard(transfer.keys) if lost else keys
            return evolve(tiers, external_keys=keys)


def _after_external_store(config: EngineConfig, tiers: Tiers, keys: Keys) -> Tiers:
    """These tiers after a store of blocks: those that a request wanted pushed meanwhile
    are stored again.
    """
    if config.external_store is None:
        return tiers
    external_keys = tiers.external_keys
    if not config.external_store.push_only:
        external_keys = external_keys.add(keys, config.external_store.max_known_keys)
    repeated = tuple([key for key in keys if key in tiers.push_keys])
    queue = tiers.external_queue.extended(repeated, config.num_blocks)
    return evolve(tiers, external_keys=external_keys, external_queue=queue)


def _write(target: Blocks, transfer: Transfer, *, lost: bool) -> Blocks:
    """The index that a transfer wrote to, with its blocks; if they were lost, without."""
    change = Transaction(target)
    for path in transfer.paths:
        broken = path.parent != ROOT and path.parent not in change.prefix.nodes
        if lost or broken:
            change.pool.release(flattened(path.pages))
            continue
        if is_state(path.keys[0], change.prefix.state_group):
            ((key,), (pages,)) = path.keys, path.pages
            if not change.prefix.publish_state(path.parent, key, pages):
                change.pool.release(pages)
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
    release = change.prefix.release if transfer.kind.to_device else change.prefix.unpin
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

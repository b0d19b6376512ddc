"""The specification of transfers between tiers: what a turn begins, and what its reports
end.
"""

from collections.abc import Iterable, Sequence

from minfer.blocks.keys import group_key, group_keys
from minfer.blocks.ownership import Blocks
from minfer.blocks.prefix import Pages, PrefixIndex, flattened, is_live, node_of
from minfer.blocks.window import outside, unreleased
from minfer.records.config import EngineConfig
from minfer.records.messages import (
    Event,
    FetchBlocks,
    Loading,
    Lost,
    LostBlocks,
    Move,
    Moved,
    Recomputing,
    StoreBlocks,
    Submit,
    TransferCommand,
)
from minfer.records.state import EngineState, Transition
from minfer.records.tiers import Transfer, TransferKind
from minfer.testing.books import Books
from minfer.testing.invariants import require


def check_transfers(
    books: Books, before: EngineState, events: Iterable[Event], turn: Transition
) -> None:
    """Raise InvariantError unless the transfers in flight are those before the turn,
    without those that its events ended, and with those that its commands begin.
    """
    commands = [
        command for command in turn.commands if isinstance(command, TransferCommand)
    ]
    books.transfers |= {command.number for command in commands}
    after = {transfer.number: transfer for transfer in turn.state.tiers.transfers}
    require(after.keys() == books.transfers, "tiers", "transfers that did not begin")
    for command in commands:
        transfer = after[command.number]
        if isinstance(command, Move):
            _check_move(command, transfer, before, turn.state)
        else:
            _check_external(command, transfer, before, turn.state)
        if transfer.kind.to_device:
            _check_load(transfer, turn.state)
    if not any(isinstance(event, Lost) for event in events):
        ended_numbers = [event.number for event in events if isinstance(event, Moved)]
        ended = [
            transfer
            for transfer in before.tiers.transfers
            if transfer.number in ended_numbers
        ]
        for transfer in ended:
            if transfer.kind is not TransferKind.STORE_TO_EXTERNAL:
                _check_arrived(transfer, turn.state)
        stored = [
            transfer
            for transfer in ended
            if transfer.kind is TransferKind.STORE_TO_EXTERNAL
        ]
        if (
            books.config.external_store is not None
            and not books.config.external_store.push_only
        ):
            _check_known(events, stored, turn.state)
    transfers = [after[command.number] for command in commands]
    _check_reasons(turn, transfers)
    _check_hits_kept(
        books.config,
        turn,
        [transfer for transfer in transfers if transfer.kind.to_device],
    )


def _blocks_of(state: EngineState, *, device: bool) -> Blocks:
    host = state.tiers.host
    require(device or host is not None, "tiers", "a transfer without a tier")
    return state.blocks if device or host is None else host


def _check_move(
    move: Move, transfer: Transfer, before: EngineState, now: EngineState
) -> None:
    """Check that a transfer reads the blocks of its keys, each behind the one before, and
    writes nothing that has content.
    """
    require(move.kind is transfer.kind, "tiers", "a transfer the other way")
    right = move.targets == transfer.targets
    require(right and len(move.sources) == len(move.targets), "tiers", "other pages")
    source = _blocks_of(now, device=not move.kind.to_device).prefix
    _check_reads(source, transfer, move.sources)
    earlier, later = (
        _blocks_of(state, device=move.kind.to_device).prefix for state in (before, now)
    )
    _check_writes_new(earlier, later, transfer)


def _check_external(
    command: StoreBlocks | FetchBlocks,
    transfer: Transfer,
    before: EngineState,
    now: EngineState,
) -> None:
    """Check that blocks of the device are stored under their own keys; or that those are
    fetched that the external store is believed to have, and the device has not.
    """
    require(command.kind is transfer.kind, "tiers", "a transfer the other way")
    require(command.keys == transfer.keys, "tiers", "other blocks")
    if isinstance(command, StoreBlocks):
        _check_reads(now.blocks.prefix, transfer, flattened(command.pages))
        return
    require(flattened(command.pages) == transfer.targets, "tiers", "other pages")
    is_believed = all(key in now.tiers.external_keys for key in command.keys)
    require(
        is_believed, "tiers", "blocks that the external store is not believed to have"
    )
    _check_writes_new(before.blocks.prefix, now.blocks.prefix, transfer)


def _check_reads(source: PrefixIndex, transfer: Transfer, pages: Pages) -> None:
    read = [node_of(source, key) for key in transfer.keys]
    expected = tuple(page for node in read if node is not None for page in node.pages)
    require(expected == pages, "tiers", f"{pages} are read, not {expected}")
    for path in transfer.paths:
        for key, parent in zip(path.keys, (path.parent, *path.keys), strict=False):
            node = node_of(source, key)
            follows = node is not None and node.parent == parent
            require(follows, "tiers", "a block is behind another one")


def _check_writes_new(before: PrefixIndex, now: PrefixIndex, transfer: Transfer) -> None:
    """Check that what is written was not there, in the same pages, before and after the
    turn. In the turn in which it begins, a running sequence may publish the same content,
    to release blocks behind its window for a newcomer: that is known after the transfer
    was chosen, as it is in later turns.
    """
    for key in transfer.keys:
        old, new = node_of(before, key), node_of(now, key)
        stays = old is not None and new is not None and old.pages == new.pages
        require(not stays, "tiers", "what is written is there already")


def _check_load(transfer: Transfer, now: EngineState) -> None:
    """Check that no plan in flight needs what a load writes, and that its sample
    waits.
    """
    copied = {copy.source for plan in now.inflight for copy in plan.copies}
    free = copied.isdisjoint(transfer.targets)
    require(free, "tiers", "a plan in flight copies from what is written")
    sample = transfer.sample
    waits = sample is not None and sample[0] in transfer.waiting
    waiting_ids = {seq.id for seq in now.waiting}
    require(
        waits and sample in waiting_ids, "tiers", "a load for a sample that does not wait"
    )


def _check_known(
    events: Iterable[Event], stored: Sequence[Transfer], now: EngineState
) -> None:
    """Check that the external store is believed to have what was stored there: at least
    one of the last blocks, as not all may be remembered. A request may say otherwise.
    """
    requests = [event.request for event in events if isinstance(event, Submit)]
    if stored and not any(request.kv_transfer is not None for request in requests):
        is_believed = any(
            transfer.keys[-1] in now.tiers.external_keys for transfer in stored
        )
        require(is_believed, "tiers", "stored blocks are not known")


def _check_arrived(transfer: Transfer, now: EngineState) -> None:
    """Check that its blocks are cached where they went, unless their parents are not, or
    they were evicted in the same turn.
    """
    target = _blocks_of(now, device=transfer.kind.to_device)
    if target.available == 0 or target.idle == 0:
        return
    for path in transfer.paths:
        is_cached = [key in target.prefix.nodes for key in path.keys]
        in_order = is_cached == sorted(is_cached, reverse=True)
        require(in_order, "tiers", "a cached block whose parent is not")


def _check_reasons(turn: Transition, transfers: Sequence[Transfer]) -> None:
    """Check that each load has its reason, and each reason its figures."""
    loads = [transfer.kind for transfer in transfers if transfer.kind.to_device]
    reasons = [
        reason for reason in turn.reasons if isinstance(reason, Loading | Recomputing)
    ]
    reported = [reason.kind for reason in reasons if isinstance(reason, Loading)]
    require(
        reported == loads,
        "tiers",
        f"{loads} loads begin, of which {reported} are reported",
    )
    for reason in reasons:
        require(0 <= reason.hit < reason.blocks, "tiers", f"{reason} gains nothing")


def _check_hits_kept(
    config: EngineConfig, turn: Transition, loads: Sequence[Transfer]
) -> None:
    """Check that all blocks of the hit that a load is for are held, or on their way."""
    reasons = [reason for reason in turn.reasons if isinstance(reason, Loading)]
    waiting, size = {seq.id: seq for seq in turn.state.waiting}, config.block_size
    for reason, transfer in zip(reasons, loads, strict=True):
        keys, end = waiting[reason.id, reason.sample].keys, reason.blocks
        for g, group in enumerate(config.block_groups):
            low, sinks = outside(end * size, group.window, size), group.sink_blocks(size)
            read_keys = group_keys(unreleased(keys, 0, end, low, sinks), g)
            cached_keys = [key for key in read_keys if key not in transfer.keys]
            is_held = all(is_live(turn.state.blocks.prefix, key) for key in cached_keys)
            require(is_held, "tiers", f"a block of the hit of {reason.id} can be evicted")
        if config.state_group is not None:
            key = group_key(keys[end - 1], config.state_group)
            is_held = key in transfer.keys or is_live(turn.state.blocks.prefix, key)
            require(is_held, "tiers", f"the state of {reason.id} can be evicted")


def check_losses(events: Iterable[Event], lost: int, turn: Transition) -> None:
    """Raise InvariantError unless each of the lost transfers is reported."""
    num_reported = sum(isinstance(reason, LostBlocks) for reason in turn.reasons)
    require(
        num_reported == lost,
        "tiers",
        f"{lost} lost, {num_reported} reported: {list(events)}",
    )

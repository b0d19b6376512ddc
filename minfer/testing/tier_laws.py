"""The specification of transfers between tiers: what a turn begins, and what its reports
end.
"""

from collections.abc import Iterable, Sequence

from minfer.blocks.keys import group_keys
from minfer.blocks.ownership import Blocks
from minfer.blocks.prefix import Pages, PrefixIndex, flattened, is_live, node_of
from minfer.blocks.window import kept, outside
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
    begun = [one for one in turn.commands if isinstance(one, TransferCommand)]
    books.transfers |= {command.number for command in begun}
    after = {one.number: one for one in turn.state.tiers.transfers}
    require(after.keys() == books.transfers, "tiers", "transfers that did not begin")
    for command in begun:
        transfer = after[command.number]
        if isinstance(command, Move):
            _moves(command, transfer, turn.state)
        else:
            _by_key(command, transfer, turn.state)
        if transfer.kind.to_device:
            _loads(transfer, turn.state)
    if not any(isinstance(one, Lost) for one in events):
        done = [one.number for one in events if isinstance(one, Moved)]
        ended = [one for one in before.tiers.transfers if one.number in done]
        for one in ended:
            if one.kind is not TransferKind.STORE_TO_EXTERNAL:
                _arrived(one, turn.state)
        stored = [one for one in ended if one.kind is TransferKind.STORE_TO_EXTERNAL]
        if (
            books.config.external_store is not None
            and not books.config.external_store.push_only
        ):
            _known(events, stored, turn.state)
    transfers = [after[command.number] for command in begun]
    _reasons(turn, transfers)
    _keeps_hits(books.config, turn, [one for one in transfers if one.kind.to_device])


def _blocks_of(state: EngineState, *, device: bool) -> Blocks:
    host = state.tiers.host
    require(device or host is not None, "tiers", "a transfer without a tier")
    return state.blocks if device or host is None else host


def _moves(move: Move, transfer: Transfer, now: EngineState) -> None:
    """Check that a transfer reads the blocks of its keys, each behind the one before, and
    writes nothing that has content.
    """
    require(move.kind is transfer.kind, "tiers", "a transfer the other way")
    right = move.targets == transfer.targets
    require(right and len(move.sources) == len(move.targets), "tiers", "other pages")
    source = _blocks_of(now, device=not move.kind.to_device).prefix
    _reads(source, transfer, move.sources)
    _writes_new(_blocks_of(now, device=move.kind.to_device).prefix, transfer)


def _by_key(
    command: StoreBlocks | FetchBlocks, transfer: Transfer, now: EngineState
) -> None:
    """Check that blocks of the device are stored under their own keys; or that those are
    fetched that the external store is believed to have, and the device has not.
    """
    require(command.kind is transfer.kind, "tiers", "a transfer the other way")
    require(command.keys == transfer.keys, "tiers", "other blocks")
    if isinstance(command, StoreBlocks):
        _reads(now.blocks.prefix, transfer, flattened(command.pages))
        return
    require(flattened(command.pages) == transfer.targets, "tiers", "other pages")
    known = all(key in now.tiers.external_keys for key in command.keys)
    require(known, "tiers", "blocks that the external store is not believed to have")
    _writes_new(now.blocks.prefix, transfer)


def _reads(source: PrefixIndex, transfer: Transfer, pages: Pages) -> None:
    read = [node_of(source, key) for key in transfer.keys]
    own = tuple(page for node in read if node is not None for page in node.pages)
    require(own == pages, "tiers", f"{pages} are read, not {own}")
    for path in transfer.paths:
        for key, parent in zip(path.keys, (path.parent, *path.keys), strict=False):
            node = node_of(source, key)
            follows = node is not None and node.parent == parent
            require(follows, "tiers", "a block is behind another one")


def _writes_new(target: PrefixIndex, transfer: Transfer) -> None:
    twice = [key for key in transfer.keys if key in target.nodes]
    require(not twice, "tiers", "what is written is there already")


def _loads(transfer: Transfer, now: EngineState) -> None:
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


def _known(events: Iterable[Event], stored: Sequence[Transfer], now: EngineState) -> None:
    """Check that the external store is believed to have what was stored there: at least
    one of the last blocks, as not all may be remembered. A request may say otherwise.
    """
    requests = [one.request for one in events if isinstance(one, Submit)]
    if stored and not any(one.kv_transfer is not None for one in requests):
        known = any(one.keys[-1] in now.tiers.external_keys for one in stored)
        require(known, "tiers", "stored blocks are not known")


def _arrived(transfer: Transfer, now: EngineState) -> None:
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


def _reasons(turn: Transition, transfers: Sequence[Transfer]) -> None:
    """Check that each load has its reason, and each reason its figures."""
    loads = [one.kind for one in transfers if one.kind.to_device]
    reasons = [one for one in turn.reasons if isinstance(one, Loading | Recomputing)]
    begun = [one.kind for one in reasons if isinstance(one, Loading)]
    require(begun == loads, "tiers", f"{loads} loads begin, of which {begun} are said")
    for one in reasons:
        require(0 <= one.hit < one.blocks, "tiers", f"{one} gains nothing")


def _keeps_hits(
    config: EngineConfig, turn: Transition, loads: Sequence[Transfer]
) -> None:
    """Check that all blocks of the hit that a load is for are held, or on their way."""
    reasons = [one for one in turn.reasons if isinstance(one, Loading)]
    waiting, size = {seq.id: seq for seq in turn.state.waiting}, config.block_size
    for reason, transfer in zip(reasons, loads, strict=True):
        keys, end = waiting[reason.id, reason.sample].keys, reason.blocks
        for g, group in enumerate(config.groups):
            low, sinks = outside(end * size, group.window, size), group.sink_blocks(size)
            own = group_keys(kept(keys, 0, end, low, sinks), g)
            rest = [key for key in own if key not in transfer.keys]
            held = all(is_live(turn.state.blocks.prefix, key) for key in rest)
            require(held, "tiers", f"a block of the hit of {reason.id} can be evicted")


def check_losses(events: Iterable[Event], lost: int, turn: Transition) -> None:
    """Raise InvariantError unless each of the lost transfers is reported."""
    num_reported = sum(isinstance(reason, LostBlocks) for reason in turn.reasons)
    require(
        num_reported == lost,
        "tiers",
        f"{lost} lost, {num_reported} reported: {list(events)}",
    )

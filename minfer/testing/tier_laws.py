"""The specification of transfers between tiers: what a turn begins, and what its reports
end.
"""

from collections.abc import Iterable, Sequence

from minfer.blocks.ownership import Blocks
from minfer.blocks.prefix import node_of
from minfer.records.messages import (
    Event,
    Loading,
    Lost,
    LostBlocks,
    Move,
    Moved,
    Recomputing,
)
from minfer.records.state import EngineState, Transition
from minfer.records.tiers import Transfer
from minfer.testing.books import Books
from minfer.testing.invariants import require


def check_transfers(
    books: Books, before: EngineState, events: Iterable[Event], turn: Transition
) -> None:
    """Raise InvariantError unless the transfers in flight are those before the turn,
    without those that its events ended, and with those that its commands begin.
    """
    moves = [one for one in turn.commands if isinstance(one, Move)]
    books.transfers |= {move.number for move in moves}
    after = {one.number: one for one in turn.state.tiers.transfers}
    require(after.keys() == books.transfers, "tiers", "transfers that did not begin")
    for move in moves:
        _begun(move, after[move.number], turn.state)
    lost = {one.number for one in events if isinstance(one, Lost)}
    done = [one.number for one in events if isinstance(one, Lost | Moved)]
    for one in before.tiers.transfers:
        if one.number in done and one.number not in after and not lost:
            _arrived(one, turn.state)
    _reasons(turn, moves)


def _contents(state: EngineState, *, device: bool) -> Blocks:
    host = state.tiers.host
    require(device or host is not None, "tiers", "a transfer without a tier")
    return state.blocks if device or host is None else host


def _begun(move: Move, transfer: Transfer, now: EngineState) -> None:
    """Check that a transfer reads the blocks of its keys, each behind the one before, and
    writes nothing that has content.
    """
    require(move.loads == transfer.loads, "tiers", "a transfer the other way")
    right = move.targets == transfer.targets
    require(right and len(move.sources) == len(move.targets), "tiers", "other pages")
    source = _contents(now, device=not move.loads).prefix
    read = [node_of(source, key) for key in transfer.keys]
    pages = tuple(page for node in read if node is not None for page in node.pages)
    require(pages == move.sources, "tiers", f"{move.sources} are read, not {pages}")
    target = _contents(now, device=move.loads).prefix
    twice = [key for key in transfer.keys if key in target.nodes]
    require(not twice, "tiers", "what is written is there already")
    for path in transfer.paths:
        for key, parent in zip(path.keys, (path.parent, *path.keys), strict=False):
            node = node_of(source, key)
            follows = node is not None and node.parent == parent
            require(follows, "tiers", "a block is behind another one")
    if move.loads:
        copied = {copy.source for plan in now.inflight for copy in plan.copies}
        free = copied.isdisjoint(move.targets)
        require(free, "tiers", "a plan in flight copies from what is written")
        sample = transfer.sample
        waits = sample is not None and sample[0] in transfer.waiting
        here = {seq.id for seq in now.waiting}
        require(
            waits and sample in here, "tiers", "a load for a sample that does not wait"
        )


def _arrived(transfer: Transfer, now: EngineState) -> None:
    """Check that its blocks are cached where they went, unless their parents are not, or
    they were evicted in the same turn.
    """
    target = _contents(now, device=transfer.loads)
    if target.available == 0 or target.idle == 0:
        return
    for path in transfer.paths:
        known = [key in target.prefix.nodes for key in path.keys]
        right = known == sorted(known, reverse=True)
        require(right, "tiers", "a cached block whose parent is not")


def _reasons(turn: Transition, moves: Sequence[Move]) -> None:
    """Check that each load has its reason, and each reason its figures."""
    loads = sum(move.loads for move in moves)
    reasons = [one for one in turn.reasons if isinstance(one, Loading | Recomputing)]
    begun = sum(isinstance(one, Loading) for one in reasons)
    require(begun == loads, "tiers", f"{loads} loads begin, of which {begun} are said")
    for one in reasons:
        require(0 <= one.hit < one.blocks, "tiers", f"{one} gains nothing")


def check_losses(events: Iterable[Event], lost: int, turn: Transition) -> None:
    """Raise InvariantError unless each of the lost transfers is reported."""
    said = sum(isinstance(one, LostBlocks) for one in turn.reasons)
    require(said == lost, "tiers", f"{lost} lost, {said} reported: {list(events)}")

"""The specification of copies: a newcomer may begin with a copy of a partial block, page
by page, in every group of layers.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain

from minfer.blocks.keys import group_key
from minfer.blocks.prefix import pages_of
from minfer.records.config import EngineConfig
from minfer.records.messages import Admitted
from minfer.records.plan import Copy, Plan
from minfer.records.sequence import SampleId
from minfer.records.state import EngineState
from minfer.testing.accounts import SampleAccount, Seat, SeatTables, touched
from minfer.testing.books import Books
from minfer.testing.invariants import require


def check_copies(
    books: Books,
    plan: Plan,
    here: Mapping[int, Seat],
    newcomers: Mapping[SampleId, Admitted],
    after: EngineState,
) -> None:
    """Raise InvariantError unless a newcomer's copies are of a sibling's computed partial
    block, or of a published one, into a block of its own; or if there are other copies.
    """
    left = list(plan.copies)
    for at, seat in here.items():
        got = newcomers.get(seat.account.id)
        if got is not None and got.copied:
            for copy in _copied(books, left, seat, got, plan.starts[at], after):
                left.remove(copy)
    require(not left, "copy", f"{left} of no planned row")
    standing = (touched(books.config, seat, seat.kv) for seat in _seats(books.running))
    targets = Counter(chain.from_iterable(standing))
    for copy in plan.copies:
        require(targets[copy.target] == 1, "copy", f"others have block {copy.target}")


def _copied(
    books: Books,
    copies: list[Copy],
    seat: Seat,
    got: Admitted,
    start: int,
    after: EngineState,
) -> list[Copy]:
    """Those of `copies` that are for a newcomer that starts at `start`: a page each."""
    one, config = seat.account, books.config
    ends = start == got.hit + got.copied == len(one.request.prompt) - 1
    require(ends and got.copied < config.block_size, "copy", f"{got}: starts at {start}")
    # the block in which it starts, whose first positions are copied
    block = start // config.block_size
    targets = _block_pages(config, seat.tables, block)
    mine = [copy for copy in copies if copy.target in targets]
    into = sorted(copy.target for copy in mine) == sorted(targets)
    require(into, "copy", f"{one.id} has KV up to {start}, but from where?")
    counts = all(copy.count == got.copied for copy in mine)
    of = {copy.target: copy.source for copy in mine}
    from_ = [of[page] for page in targets]
    tails = one.request.continuation.tail_keys
    if tails is not None:
        nodes = after.blocks.prefix.nodes
        keys = [group_key(tails[0], g) for g in range(len(config.groups))]
        # It may have been evicted since.
        whole = all(key in nodes for key in keys)
        found = not whole or [*pages_of(after.blocks.prefix, keys)] == from_
        kept = got.hit == block * config.block_size and found
        require(counts and kept, "copy", f"{mine}: not the tail of its prompt")
        return mine
    sources = [
        _block_pages(config, other.tables, block)
        for other in _seats(books.running)
        if other is not seat
        and other.account.request.id == one.request.id
        and other.kv >= start
    ]
    same = from_ in sources and counts
    require(same, "copy", f"{mine}: not the tail of a sibling's prompt")
    return mine


def _block_pages(config: EngineConfig, tables: SeatTables, block: int) -> list[int]:
    """The pages of a block in all groups."""
    each = zip(tables, config.groups, strict=True)
    return [
        page
        for table, group in each
        for page in table[block * group.pages : (block + 1) * group.pages]
    ]


def _seats(running: Iterable[SampleAccount]) -> list[Seat]:
    return [one.seat for one in running if one.seat is not None]

"""The specification of copies: a newcomer may begin with a copy of a partial block, page
by page, in every group of layers.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from minfer.blocks.keys import group_key
from minfer.blocks.prefix import pages_of
from minfer.records.config import EngineConfig
from minfer.records.messages import Admitted
from minfer.records.plan import Copy, Plan
from minfer.records.sequence import SampleId
from minfer.records.state import EngineState
from minfer.testing.accounts import SampleAccount, Seat, SeatTables, touched_pages
from minfer.testing.books import Books
from minfer.testing.invariants import require


def check_copies(
    books: Books,
    plan: Plan,
    seats: Mapping[int, Seat],
    newcomers: Mapping[SampleId, Admitted],
    after: EngineState,
    of_states: Sequence[Copy] = (),
) -> None:
    """Raise InvariantError unless a newcomer's copies are of a sibling's computed partial
    block, or of a published one, into a block of its own; or if there are other copies,
    but `of_states`.
    """
    remaining = [copy for copy in plan.copies if copy not in of_states]
    for index, seat in seats.items():
        admission = newcomers.get(seat.account.id)
        if admission is not None and admission.copied:
            for copy in _copies_of(
                books, remaining, seat, admission, plan.starts[index], after
            ):
                remaining.remove(copy)
    require(not remaining, "copy", f"{remaining} of no planned row")
    in_use = (
        touched_pages(books.config, seat, seat.kv) for seat in _seats(books.running)
    )
    targets = Counter(chain.from_iterable(in_use))
    for copy in plan.copies:
        require(targets[copy.target] == 1, "copy", f"others have block {copy.target}")


def _copies_of(
    books: Books,
    copies: list[Copy],
    seat: Seat,
    admission: Admitted,
    start: int,
    after: EngineState,
) -> list[Copy]:
    """Those of `copies` that are for a newcomer that starts at `start`: a page each."""
    account, config = seat.account, books.config
    at_end = start == admission.hit + admission.copied == len(account.request.prompt) - 1
    require(
        at_end and admission.copied < config.block_size,
        "copy",
        f"{admission}: starts at {start}",
    )
    # the block in which it starts, whose first positions are copied
    block = start // config.block_size
    targets = _block_pages(config, seat.tables, block)
    own = [copy for copy in copies if copy.target in targets]
    covers = sorted(copy.target for copy in own) == sorted(targets)
    require(covers, "copy", f"{account.id} has KV up to {start}, but from where?")
    full = all(copy.count == admission.copied for copy in own)
    source_of = {copy.target: copy.source for copy in own}
    copied_pages = [source_of[page] for page in targets]
    tails = account.request.continuation.tail_keys
    if tails is not None:
        nodes = after.blocks.prefix.nodes
        keys = [group_key(tails[0], g) for g in range(len(config.groups))]
        # It may have been evicted since.
        is_cached = all(key in nodes for key in keys)
        is_tail = not is_cached or [*pages_of(after.blocks.prefix, keys)] == copied_pages
        is_copy = admission.hit == block * config.block_size and is_tail
        require(full and is_copy, "copy", f"{own}: not the tail of its prompt")
        return own
    sources = [
        _block_pages(config, sibling.tables, block)
        for sibling in _seats(books.running)
        if sibling is not seat
        and sibling.account.request.id == account.request.id
        and sibling.kv >= start
    ]
    of_sibling = copied_pages in sources and full
    require(of_sibling, "copy", f"{own}: not the tail of a sibling's prompt")
    return own


def _block_pages(config: EngineConfig, tables: SeatTables, block: int) -> list[int]:
    """The pages of a block in all groups."""
    pairs = zip(tables, config.block_groups, strict=False)
    return [
        page
        for table, group in pairs
        for page in table[block * group.pages : (block + 1) * group.pages]
    ]


def _seats(running: Iterable[SampleAccount]) -> list[Seat]:
    return [account.seat for account in running if account.seat is not None]

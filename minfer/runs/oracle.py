"""The oracle: an executor whose tokens depend on every block that attention would read.

Memory holds, per block, a running digest after each slot: what the KV written there
stands for, which is the token, its position and all that attention saw before it *through
the block table*. The next token is a hash over the digests of all blocks of the table. So
an aliased, stale, unmoved or wrongly rolled back block changes tokens, and a table, a
position or a feed that is off by one does too. The cost of a step is its new tokens plus
one digest per block. Hashes are of tuples of int, which Python does not randomise: the
same in every process.
"""

from collections import deque
from collections.abc import Iterator
from itertools import islice

from attrs import define

from minfer.blocks import outside
from minfer.messages import Executed, Failed
from minfer.plan import Plan
from minfer.request import Request

START = 7  # the digest before the first slot of a block
_GARBAGE = (
    0x5EED  # what reading memory that nobody wrote looks like, with the place mixed in
)


@define
class Row:
    """What a device row keeps of its sample."""

    request: Request
    sample: int
    table: list[int]
    last: int = 0  # the token it sampled last
    next: int = 0  # the position that token takes


class Oracle:
    """An executor over digests."""

    def __init__(self, block_size: int, vocab: int, window: int = 0) -> None:
        self.block_size, self.vocab, self.window = block_size, vocab, window
        self.memory: dict[int, list[int]] = {}  # block -> digest after each slot written
        self.rows: dict[int, Row] = {}
        self.plans: deque[Plan] = deque()

    def launch(self, plan: Plan) -> None:
        """Queue the plan; it runs when its results are asked for."""
        self.plans.append(plan)

    def collect(self) -> Executed | Failed:
        """Run the next plan."""
        plan = self.plans.popleft()
        return Executed(plan.step, tuple(self._run(plan)))

    def fail(self, error: str, *, halfway: bool) -> Failed:
        """Fail the next plan and forget all after it; rows lose what the device kept for
        them.
        """
        plan = self.plans[0]
        if halfway:
            list(self._run(plan))
        for index in {row for void in self.plans for row in void.rows} & self.rows.keys():
            self.rows[index].last = self.rows[index].next = -1
        self.plans.clear()
        return Failed(plan.step, error)

    def close(self) -> None:
        """Forget everything."""
        self.memory.clear()
        self.rows.clear()
        self.plans.clear()

    def _run(self, plan: Plan) -> Iterator[tuple[int, ...]]:
        for opened in plan.opens:
            row = Row(opened.request, opened.sample, list(opened.table))
            self.rows[plan.rows[opened.index]] = row
        for grow in plan.grows:
            if len(self.rows[grow.row].table) != grow.at:
                raise AssertionError(
                    f"row {grow.row}: table grows at {grow.at}, not at its end"
                )
            self.rows[grow.row].table += grow.blocks
        for copy in plan.copies:
            self.memory[copy.target] = self.memory.get(copy.source, [])[: copy.count]
        fills = {fill.index: fill.tokens for fill in plan.fills}
        for i, index in enumerate(plan.rows):
            fill, start = fills.get(i), plan.starts[i]
            yield tuple(self._row(self.rows[index], fill, start, plan.most[i]))

    def _row(
        self, row: Row, fill: tuple[int, ...] | None, start: int, yields: int
    ) -> Iterator[int]:
        if fill is not None:
            row.next = start
        elif row.next > start:
            raise AssertionError(f"a row at {row.next} was planned to start by {start}")
        self._write(row, (row.last,) if fill is None else fill)
        for turn in range(yields):
            if turn:
                self._write(row, (row.last,))
            row.last = self._draw(row)
            yield row.last

    def _write(self, row: Row, tokens: tuple[int, ...]) -> None:
        """Write the KV of the row's next inputs."""
        unread, end = iter(tokens), row.next + len(tokens)
        while row.next < end:
            at, slot = divmod(row.next, self.block_size)
            block, seen = row.table[at], self._seen(row, at, row.next)
            here, slots = self._read(block, slot - 1), self.memory.setdefault(block, [])
            del slots[slot:]
            slots += [hash((_GARBAGE, block, gap)) for gap in range(len(slots), slot)]
            for token in islice(unread, self.block_size - slot):
                seen = self._seen(row, at, row.next) if self.window else seen
                here = hash((here, token, row.next, seen))
                slots.append(here)
                row.next += 1

    def _draw(self, row: Row) -> int:
        """The token that follows the row's inputs so far; noise only where
        one samples.
        """
        at, slot = divmod(row.next - 1, self.block_size)
        here, seen = self._read(row.table[at], slot), self._seen(row, at, row.next - 1)
        noise = (
            (row.request.seed, row.sample) if row.request.sampling.temperature > 0 else ()
        )
        return hash((seen, here, row.next, *noise)) % self.vocab

    def _seen(self, row: Row, upto: int, position: int) -> int:
        """A digest of the blocks that `position` sees before entry `upto`, each read
        anew.
        """
        last, low = self.block_size - 1, outside(position, self.window, self.block_size)
        return hash(tuple(self._read(block, last) for block in row.table[low:upto]))

    def _read(self, block: int, slot: int) -> int:
        if slot < 0:
            return START
        slots = self.memory.get(block, ())
        return (
            slots[slot]
            if slot < len(slots)
            else hash((_GARBAGE, block, slot, len(slots)))
        )

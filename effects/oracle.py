"""The oracle: an executor whose tokens depend on every block that attention would read.

Memory holds, per block, a running digest after each slot: what the KV written there stands for,
which is the token, its position and all that attention saw before it *through the block table*.
The next token is a hash over the digests of all blocks of the table. So an aliased, stale, unmoved
or wrongly rolled back block changes tokens, and a table, a position or a feed that is off by one
does too. The cost of a step is its new tokens plus one digest per block.

`reference` says in a few lines what a request must yield, alone and without blocks.

Hashes are of tuples of int, which Python does not randomise: the same in every process.
"""

from collections import deque
from collections.abc import Iterator
from itertools import islice
from random import Random

from attrs import define

from minfer.blocks import outside
from minfer.messages import Executed, Failed
from minfer.plan import Plan
from minfer.request import Request

_START = 7  # the digest before the first slot of a block
_GARBAGE = 0x5EED  # what reading memory that nobody wrote looks like, with the place mixed in


def drawn(request: Request, sample: int, position: int, seen: int, here: int, vocab: int) -> int:
    """The token at `position`, from all that attention reads; noise only where one samples."""
    noise = (request.seed, sample) if request.sampling.temperature > 0 else ()
    return hash((seen, here, position, *noise)) % vocab


def reference(
    request: Request, sample: int, block_size: int, vocab: int, limit: int, window: int = 0
) -> list[int]:
    """Output tokens of one sample, computed alone; `limit` bounds prompt and output together."""
    digests: list[int] = []
    tokens, here, out = [*request.prompt, *request.output], _START, []
    for position in range(min(len(request.prompt) + request.max_tokens, limit) - 1):
        here = here if position % block_size else _START
        seen = hash(tuple(digests[outside(position, window, block_size) :]))
        here = hash((here, tokens[position], position, seen))  # the block's digest, one slot on
        if (position + 1) % block_size == 0:
            digests.append(here)
        if position + 1 == len(tokens):
            tokens.append(drawn(request, sample, position + 1, seen, here, vocab))
            out.append(tokens[-1])
            if tokens[-1] in request.stop_ids:
                break
    return out


@define
class _Row:
    request: Request
    sample: int
    table: list[int]
    last: int = 0  # the token it sampled last
    next: int = 0  # the position that token takes


class Oracle:
    """An executor over digests. `short` makes rows of repeated plans yield less than their most."""

    def __init__(
        self, block_size: int, vocab: int, short: Random | None = None, window: int = 0
    ) -> None:
        self.block_size, self.vocab, self.short, self.window = block_size, vocab, short, window
        self.memory: dict[int, list[int]] = {}  # block -> digest after each slot written
        self.rows: dict[int, _Row] = {}
        self.plans: deque[Plan] = deque()

    def launch(self, plan: Plan) -> None:
        """Queue the plan; it runs when its results are asked for."""
        self.plans.append(plan)

    def collect(self) -> Executed | Failed:
        """Run the next plan."""
        plan = self.plans.popleft()
        return Executed(plan.step, tuple(self._run(plan)))

    def fail(self, error: str, *, halfway: bool) -> Failed:
        """Fail the next plan and forget all after it; rows lose what the device kept for them."""
        plan = self.plans[0]
        if halfway:
            list(self._run(plan))
        for index in {row for void in self.plans for row in void.rows}:
            if index in self.rows:
                self.rows[index].last = self.rows[index].next = -1
        self.plans.clear()
        return Failed(plan.step, error)

    def close(self) -> None:
        """Forget everything."""
        self.memory.clear()
        self.rows.clear()

    def _run(self, plan: Plan) -> Iterator[tuple[int, ...]]:
        for opened in plan.opens:
            row = _Row(opened.request, opened.sample, list(opened.table))
            self.rows[plan.rows[opened.index]] = row
        for grow in plan.grows:
            if len(self.rows[grow.row].table) != grow.at:
                raise AssertionError(f"row {grow.row}: table grows at {grow.at}, not at its end")
            self.rows[grow.row].table += grow.blocks
        for copy in plan.copies:
            self.memory[copy.target] = self.memory.get(copy.source, [])[: copy.count]
        fills = {fill.index: fill.tokens for fill in plan.fills}
        for i, index in enumerate(plan.rows):
            most = plan.most[i]
            if self.short is not None and most > 1:
                most = self.short.randint(1, most)
            yield self._row(self.rows[index], fills.get(i), plan.starts[i], plan.most[i], most)

    def _row(
        self, row: _Row, fill: tuple[int, ...] | None, start: int, most: int, yields: int
    ) -> tuple[int, ...]:
        if fill is not None:
            row.next = start
            self._write(row, fill)
            if most:
                row.last = self._draw(row)
            return (row.last,) * most
        if not row.next <= start:
            raise AssertionError(f"a row at {row.next} was planned to start by {start}")
        out = []
        for _ in range(yields):
            self._write(row, (row.last,))
            row.last = self._draw(row)
            out.append(row.last)
        return tuple(out)

    def _write(self, row: _Row, tokens: tuple[int, ...]) -> None:
        size, position = self.block_size, row.next
        ends = position + len(tokens)
        unread = iter(tokens)
        while position < ends:
            at, slot = divmod(position, size)
            seen = self._seen(row, at, position)
            slots = self.memory.setdefault(row.table[at], [])
            del slots[slot:]
            here = self._read(row.table[at], slot - 1)
            while len(slots) < slot:
                slots.append(hash((_GARBAGE, row.table[at], len(slots))))
            for token in islice(unread, size - slot):
                seen = self._seen(row, at, position) if self.window else seen
                here = hash((here, token, position, seen))
                slots.append(here)
                position += 1
        row.next = ends

    def _draw(self, row: _Row) -> int:
        at, slot = divmod(row.next - 1, self.block_size)
        here = self._read(row.table[at], slot)
        seen = self._seen(row, at, row.next - 1)
        return drawn(row.request, row.sample, row.next, seen, here, self.vocab)

    def _seen(self, row: _Row, upto: int, position: int) -> int:
        """A digest of the blocks that `position` sees before entry `upto`, each read anew."""
        last, low = self.block_size - 1, outside(position, self.window, self.block_size)
        return hash(tuple(self._read(block, last) for block in row.table[low:upto]))

    def _read(self, block: int, slot: int) -> int:
        if slot < 0:
            return _START
        slots = self.memory.get(block, ())
        return slots[slot] if slot < len(slots) else hash((_GARBAGE, block, slot, len(slots)))

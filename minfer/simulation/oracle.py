"""The oracle: an executor whose tokens depend on every block that attention would read.

Recurrent layers have a state per row, in its working pages: a digest of all inputs of the
row, which also enters the KV and the next token. It is copied and saved as plans say. So
a state of the wrong position, of another row, or one that was overwritten changes tokens.

Memory has, per block, a running digest after each slot: it stands for the KV written
there, which depends on the token, its position and all that attention saw before it
*through the block tables*. Each group of layers has KV of its own, in bundles of pages.
The next token is a hash over the digests of all blocks that attention reads through the
table of each group. So an aliased, stale, unmoved or wrongly rolled back block changes
tokens, and so does an off-by-one error of a table, a position or an input. What is in a
row's slot for adapters enters the KV and the next token, too, as it is when the step
runs: so do a wrong slot, and one that is written too early. The cost of a
step is its new tokens plus one digest per block. Hashes are of tuples of int, which
Python does not randomise: the same in every process.
"""

import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain, islice

from attrs import define, evolve

from minfer.blocks.keys import Key
from minfer.blocks.window import outside, unreleased
from minfer.records.adapters import NO_SLOT
from minfer.records.config import CacheGroup
from minfer.records.messages import (
    AdapterFailed,
    AdapterLoaded,
    Executed,
    Failed,
    FetchBlocks,
    LoadAdapter,
    Lost,
    Move,
    Moved,
    StoreBlocks,
    TransferCommand,
)
from minfer.records.plan import (
    Draft,
    NewRow,
    Plan,
    Pooled,
    SampleDeferred,
    SaveState,
    Yields,
)
from minfer.records.request import MEAN
from minfer.records.sequence import SampleId
from minfer.records.token_logprobs import Logprobs, TokenLogprobs, pack_part
from minfer.sampling.reference_sampler import RowSampling

ONE_GROUP = (CacheGroup(),)
DRAFTS_PER_ERROR = 4  # about one in 4 drafts of the draft model is wrong
INITIAL_DIGEST = 7  # the digest before the first slot of a block, in the first group
Offer = tuple[tuple[int, ...], tuple[float, ...]]
# the result of reading memory that was never written, mixed with the place
_GARBAGE = 0x5EED


def vector_of(digest: int) -> bytes:
    """Four float32 numbers that encode a digest, modulo 2^64."""
    return struct.pack("<4f", *(digest >> 16 * word & 0xFFFF for word in range(4)))


def offer_of(digest: int, vocab: int, count: int) -> Offer:
    """Tokens and their log-probabilities after a digest; the first is the sampled one."""
    count = min(count, vocab)
    tokens = tuple((digest + offset) % vocab for offset in range(count))
    logprobs = (-(1 + hash((digest, offset)) % 999) / 512 for offset in range(count))
    return tokens, tuple(accumulate(logprobs))


def packed_logprobs(first: int, digests: Sequence[int]) -> bytes:
    """Log-probabilities of the tokens of a prompt from `first` on, which encode the
    digests before them, modulo 2^30.
    """
    lines = [struct.pack("<if", digest % 2**30, 0.0) for digest in digests]
    return pack_part(first, len(lines), b"".join(lines))


def masks_by_place(
    deferred: SampleDeferred, index: int, num_drafts: int = 0
) -> list[bytes]:
    """The masks of a row with `num_drafts` drafts, place by place: as many as the tokens
    that it may yield.
    """
    by_place = {mask.place: mask.bits for mask in deferred.masks if mask.index == index}
    return [by_place.get(place, b"") for place in range(num_drafts + 1)]


@define
class OracleRow:
    """The state of a device row."""

    name: SampleId
    prompt: int  # tokens
    sampling: RowSampling
    tables: list[list[int]]  # by group: pages
    last: int = 0  # the token it sampled last
    next: int = 0  # the position of that token
    pooling: str = ""
    total: int = 0  # of the digests of all inputs since it was opened
    adapter_slot: int = NO_SLOT

    @classmethod
    def of(cls, opened: NewRow) -> "OracleRow":
        """The row of a new run id."""
        sampling, pooling = opened.sampling, opened.pooling
        tables = [*map(list, opened.tables)]
        return cls(
            opened.name,
            opened.prompt,
            sampling,
            tables,
            pooling=pooling,
            adapter_slot=opened.adapter_slot,
        )


class Oracle:
    """An executor over digests."""

    def __init__(
        self, block_size: int, vocab: int, groups: tuple[CacheGroup, ...] = ONE_GROUP
    ) -> None:
        self.block_size, self.vocab = block_size, vocab
        self.groups = tuple(group for group in groups if not group.state)
        self.state_pages = sum(group.pages for group in groups if group.state)
        self.windowed = any(group.window for group in groups)
        # Page -> digest after each slot written; of a state, one digest.
        self.memory: dict[int, list[int]] = {}
        self.host: dict[int, list[int]] = {}  # likewise, of the host tier
        # Likewise, of the external store: its pages by content key.
        self.outside: dict[Key, list[list[int]]] = {}
        self.moves: deque[TransferCommand] = deque()  # that have begun
        self.slots: dict[int, int] = {}  # the adapter in each slot, as a number
        self.loads: deque[LoadAdapter] = deque()  # that have begun
        self.rows: dict[int, OracleRow] = {}
        self.plans: deque[Plan] = deque()
        self.deferred_masks: dict[int, SampleDeferred] = {}  # by step, the host's masks

    def launch(self, plan: Plan) -> None:
        """Queue the plan; it runs when its results are collected."""
        self.plans.append(plan)

    def mask_lines(self, step: int) -> None:  # noqa: ARG002  # the protocol's
        """None: it has no memory to lend for masks."""
        return

    def sample(self, command: SampleDeferred) -> None:
        """Store the masks of a launched plan."""
        self.deferred_masks[command.step] = command

    def collect(self) -> Executed | Failed:
        """Run the next plan and return its results."""
        plan = self.plans.popleft()
        if plan.deferred and plan.step not in self.deferred_masks:
            raise AssertionError(
                f"the host has not allowed that step {plan.step} is sampled"
            )
        yields = tuple(self._run(plan))
        self.deferred_masks.pop(plan.step, None)
        logprobs, pooled = self._logprobs(plan, yields), self._pooled(plan)
        return Executed(plan.step, yields, logprobs, pooled)

    def steady_yields(self) -> tuple[int, Yields]:
        """For how many of the next steps each row yields the same token, and that: none,
        as tokens depend on all before them.
        """
        return 0, ()

    def fail(self, error: str, *, halfway: bool) -> Failed:
        """Fail the next plan and drop all after it; rows lose their state on the
        device.
        """
        plan = self.plans[0]
        if halfway:
            list(self._run(plan))
        for index in {row for plan in self.plans for row in plan.rows} & self.rows.keys():
            self.rows[index].last = self.rows[index].next = -1
        self._undefine_states(halfway=halfway)
        self.plans.clear()
        self.deferred_masks.clear()
        return Failed(plan.step, error)

    def move(
        self,
        command: TransferCommand,
        report: Callable[[Moved | Lost], None] | None = None,
    ) -> None:
        """Begin a transfer: what it writes is undefined until its end. With `report`, it
        ends at once.
        """
        self._undefine(command)
        self.moves.append(command)
        if report is not None:
            report(self.finish_move(len(self.moves) - 1))

    def finish_move(self, index: int = 0, error: str = "") -> Moved | Lost:
        """End a transfer that has begun; with an error, its pages stay undefined."""
        command = self.moves[index]
        del self.moves[index]
        if isinstance(command, FetchBlocks) and not error:
            missing = sum(key not in self.outside for key in command.keys)
            error = f"{missing} blocks are missing" if missing else ""
        if error:
            self._undefine(command)
            return Lost(command.number, error)
        match command:
            case Move(kind=kind, sources=sources, targets=targets):
                read, written = self.host, self.memory
                if not kind.to_device:
                    read, written = written, read
                for source, target in zip(sources, targets, strict=True):
                    written[target] = [*read.get(source, [])]
            case StoreBlocks(keys=keys, pages=blocks):
                for key, pages in zip(keys, blocks, strict=True):
                    self.outside[key] = [[*self.memory.get(page, [])] for page in pages]
            case FetchBlocks(keys=keys, pages=blocks):
                for key, pages in zip(keys, blocks, strict=True):
                    contents = zip(pages, self.outside[key], strict=True)
                    self.memory.update({page: [*content] for page, content in contents})
        return Moved(command.number)

    def load_adapter(
        self,
        command: LoadAdapter,
        report: Callable[[AdapterLoaded | AdapterFailed], None] | None = None,
    ) -> None:
        """Begin the load of an adapter: what is in its slot is undefined until the end.
        With `report`, it ends at once.
        """
        self.slots.pop(command.slot, None)
        self.loads.append(command)
        if report is not None:
            report(self.finish_load(len(self.loads) - 1))

    def finish_load(
        self, index: int = 0, error: str = ""
    ) -> AdapterLoaded | AdapterFailed:
        """End a load that has begun; with an error, its slot stays undefined."""
        command = self.loads[index]
        del self.loads[index]
        if error:
            return AdapterFailed(command.adapter, command.slot, error)
        self.slots[command.slot] = int(command.adapter, 16)
        return AdapterLoaded(command.adapter, command.slot)

    def _undefine(self, command: TransferCommand) -> None:
        """Make the content of what a transfer writes undefined."""
        written, pages = self.memory, list[int]()
        match command:
            case Move(kind=kind, targets=targets):
                written, pages = self.memory if kind.to_device else self.host, [*targets]
            case FetchBlocks(pages=blocks):
                pages = [page for block in blocks for page in block]
        for page in pages:
            written[page] = []

    def close(self) -> None:
        """Drop all plans and rows."""
        self.moves.clear()
        self.slots.clear()
        self.loads.clear()
        self.host.clear()
        self.outside.clear()
        self.memory.clear()
        self.rows.clear()
        self.plans.clear()

    def preview_drafts(self, index: int, count: int) -> tuple[int, ...]:
        """`count` drafts for a row, mostly right; leaves no trace in memory."""
        # pages that belong to no sequence
        blocks, unused = 1 + count // self.block_size, iter(range(-2, -(2**31), -1))
        spare = [[*islice(unused, blocks * group.pages)] for group in self.groups]
        tables = self.rows[index].tables
        pairs = zip(tables, spare, strict=False)
        scratch_tables = [[*table, *extra_pages] for table, extra_pages in pairs]
        scratch_tables += tables[len(spare) :]
        row = evolve(self.rows[index], tables=scratch_tables)
        first, last = (p // self.block_size for p in (row.next, row.next + count))
        touched = [
            page
            for g in range(len(self.groups))
            for block in range(first, last + 1)
            for page in self._pages_of(row, g, block)
        ]
        touched += self._working(row)
        saved = {page: [*self.memory.get(page, ())] for page in touched}
        self._write(row, (row.last,))
        tokens = tuple(self._drafted(row, count))
        self.memory.update(saved)
        for page in chain(*spare):
            self.memory.pop(page, None)
        return tokens

    def _run(self, plan: Plan) -> Iterator[tuple[int, ...]]:
        for opened in plan.opens:
            index = plan.rows[opened.index]
            self.rows[index] = OracleRow.of(opened)
            if not plan.starts[opened.index]:
                self._set_state(self.rows[index], INITIAL_DIGEST)
        for grow in plan.grows:
            table = self.rows[grow.row].tables[grow.group]
            if len(table) != grow.at:
                raise AssertionError(
                    f"row {grow.row}: table grows at {grow.at}, not at its end"
                )
            table += grow.blocks
        for copy in plan.copies:
            self.memory[copy.target] = self.memory.get(copy.source, [])[: copy.count]
        fills = {fill.index: fill.tokens for fill in plan.fills}
        drafts = {draft.index: draft for draft in plan.drafts}
        saves = {save.index: save for save in plan.saves}
        deferred = self.deferred_masks.get(plan.step, SampleDeferred(plan.step))
        for i, index in enumerate(plan.rows):
            row, start, count = (
                self.rows[index],
                plan.starts[i],
                plan.num_scheduled_tokens[i] - 1,
            )
            if i in drafts:
                masks = masks_by_place(deferred, i, count)
                yield tuple(self._verified(row, start, drafts[i], count, masks))
            else:
                [bits] = masks_by_place(deferred, i)
                fill = fills.get(i)
                if fill is not None and i in saves and saves[i].inside:
                    fill = self._until_saved(row, fill, start, saves.pop(i))
                    start = row.next
                yield tuple(self._row(row, fill, start, plan.max_sampled_tokens[i], bits))
        for save in saves.values():
            self._save(self.rows[plan.rows[save.index]], save)

    def _until_saved(
        self, row: OracleRow, fill: tuple[int, ...], start: int, save: SaveState
    ) -> tuple[int, ...]:
        """Take in a chunk's inputs before the position of a save, and keep that state;
        returns the other inputs.
        """
        row.next, count = start, save.inside - start
        self._write(row, fill[:count])
        self._save(row, save)
        return fill[count:]

    def _save(self, row: OracleRow, save: SaveState) -> None:
        """Copy a row's working state to the pages of a save."""
        for source, target in zip(self._working(row), save.pages, strict=True):
            self.memory[target] = [*self.memory.get(source, [])]

    def _row(
        self,
        row: OracleRow,
        fill: tuple[int, ...] | None,
        start: int,
        yields: int,
        bits: bytes = b"",
    ) -> Iterator[int]:
        if fill is not None:
            row.next = start
        else:
            self._expect(row, start)
        self._write(row, (row.last,) if fill is None else fill)
        for turn in range(yields):
            if turn:
                self._write(row, (row.last,))
            row.last = self._allowed(self._draw(row), bits)
            yield row.last

    def _expect(self, row: OracleRow, start: int) -> None:
        if row.next > start:
            raise AssertionError(f"a row at {row.next} was planned to start by {start}")

    def _verified(
        self, row: OracleRow, start: int, draft: Draft, count: int, masks: list[bytes]
    ) -> Iterator[int]:
        """Write the KV of a row's last token and of all drafts, then sample at each, as
        far as there are `masks`.
        """
        self._expect(row, start)
        first = row.next
        self._write(row, (row.last,))
        states = [self._state(row)]  # after each of the inputs
        tokens = list[int]()
        for token in draft.tokens or self._drafted(row, count):
            if draft.tokens:
                self._write(row, (token,))
            states.append(self._state(row))
            tokens.append(token)
        pairs = zip(masks, (*tokens, None), states, strict=False)
        for position, (bits, draft_token, state) in enumerate(pairs, first + 1):
            row.next = position
            self._set_state(row, state)
            row.last = self._allowed(self._draw(row), bits)
            yield row.last
            if row.last != draft_token:
                return

    def _drafted(self, row: OracleRow, count: int) -> Iterator[int]:
        """The drafts of a mostly right draft model; writes the KV of all drafts."""
        for _ in range(count):
            token = self._draw(row)
            if hash((token, row.next)) % DRAFTS_PER_ERROR == 0:
                token = (token + 1) % (self.vocab or token + 2)
            self._write(row, (token,))
            yield token

    def _allowed(self, token: int, bits: bytes) -> int:
        """The token, or the next one that a mask allows."""
        if not bits:
            return token
        size = self.vocab or 8 * len(bits)
        following = ((token + offset) % size for offset in range(size))
        return next(candidate for candidate in following if _is_set(bits, candidate))

    def _logprobs(self, plan: Plan, yields: Yields) -> Logprobs:
        """For rows that were opened with log-probabilities, those of their token, if it
        is one; empty if there is no such row.
        """
        rows = [self.rows[index] for index in plan.rows]
        if all(row.sampling.logprobs is None for row in rows):
            return ()
        pairs = zip(rows, yields, strict=True)
        return tuple(self._token_logprobs(row, *tokens) for row, tokens in pairs)

    def _token_logprobs(self, row: OracleRow, *tokens: int) -> tuple[TokenLogprobs, ...]:
        count = row.sampling.logprobs
        if count is None or len(tokens) != 1:
            return ()
        likeliest, logprobs = self._likeliest(row, max(1, count))
        rank = 1 + (likeliest.index(tokens[0]) if tokens[0] in likeliest else count)
        logprob = logprobs[min(rank, len(logprobs)) - 1]
        return (
            TokenLogprobs(tokens[0], logprob, rank, likeliest[:count], logprobs[:count]),
        )

    def _likeliest(self, row: OracleRow, count: int) -> Offer:
        return offer_of(self._digest(row), self.vocab, count)

    def _pooled(self, plan: Plan) -> Pooled:
        """For rows whose prompts have ended, a vector; for scored ones, the digests
        before each token; empty if there is no such row.
        """
        pooled = {
            fill.index: self._vector(row)
            for fill in plan.fills
            if (row := self.rows[plan.rows[fill.index]]).pooling
            and row.next == row.prompt
        }
        for fill in plan.fills:
            row = self.rows[plan.rows[fill.index]]
            start, count = plan.starts[fill.index], plan.num_scheduled_tokens[fill.index]
            num_scored = min(start + count, row.prompt - 1) - start
            if row.sampling.prompt_logprobs is not None and num_scored > 0:
                pooled[fill.index] = self._prompt_logprobs(row, start, num_scored)
        return tuple(pooled.get(i, b"") for i in range(len(plan.rows))) if pooled else ()

    def _prompt_logprobs(self, row: OracleRow, start: int, count: int) -> bytes:
        """Log-probabilities of the tokens after these inputs, from digests of KV."""
        digests = [
            sum(self._block_digests(row, position))
            for position in range(start, start + count)
        ]
        return packed_logprobs(start + 1, digests)

    def _vector(self, row: OracleRow) -> bytes:
        """The pooled vector: of its last input, or of all inputs since it was opened."""
        digest = row.total if row.pooling == MEAN else self._digest(row)
        return vector_of(digest)

    def _write(self, row: OracleRow, tokens: tuple[int, ...]) -> None:
        """Write the KV of the row's next inputs."""
        unread, end = iter(tokens), row.next + len(tokens)
        while row.next < end:
            block, slot = divmod(row.next, self.block_size)
            context = self._context(row, row.next)
            digests = self._block_digests(row, row.next - 1, block)
            slots = [
                (self._truncated(page, slot), g, k)
                for g in range(len(self.groups))
                for k, page in enumerate(self._pages_of(row, g, block))
            ]
            adapter = self._adapter(row)
            for token in islice(unread, self.block_size - slot):
                context = self._context(row, row.next) if self.windowed else context
                state = self._add_to_state(row, token)
                seen = (*context, *state, *adapter)
                digests = [hash((d, token, row.next, *seen)) for d in digests]
                for page_digests, g, k in slots:
                    page_digests.append(hash((digests[g], k)) if k else digests[g])
                row.next += 1
                row.total += sum(digests)

    def _draw(self, row: OracleRow) -> int:
        """The token that follows the row's inputs so far; with noise only if it is
        sampled.
        """
        sampling = row.sampling
        noise = (sampling.seed, sampling.sample) if sampling.temperature > 0 else ()
        return self._digest(row, *noise) % self.vocab

    def _digest(self, row: OracleRow, *noise: int) -> int:
        """The digest of all that the row's last input attends to."""
        digests = self._block_digests(row, row.next - 1)
        context = self._context(row, row.next - 1)
        state = (self._state(row),) if self.state_pages else ()
        adapter = self._adapter(row)
        return hash((*context, *digests, *state, *adapter, row.next, *noise))

    def _adapter(self, row: OracleRow) -> tuple[int, ...]:
        """What is in the row's slot for adapters, if it has one."""
        slot = row.adapter_slot
        return () if slot == NO_SLOT else (self.slots.get(slot, hash((_GARBAGE, slot))),)

    def _block_digests(
        self, row: OracleRow, position: int, block: int | None = None
    ) -> list[int]:
        """By group, the digest of a block, by default that of `position`, up to and with
        `position`.
        """
        block = position // self.block_size if block is None else block
        slot = position - block * self.block_size
        return [self._read(row, g, block, slot) for g in range(len(self.groups))]

    def _context(self, row: OracleRow, position: int) -> list[int]:
        """By group, a digest of the blocks that `position` attends to before its own,
        each read again.
        """
        size, digests = self.block_size, list[int]()
        for g, group in enumerate(self.groups):
            low, sinks = outside(position, group.window, size), group.sink_blocks(size)
            blocks = unreleased(range(position // size), 0, position // size, low, sinks)
            block_digests = [self._read(row, g, block, size - 1) for block in blocks]
            digests.append(hash(tuple(block_digests)))
        return digests

    def _pages_of(self, row: OracleRow, g: int, block: int) -> list[int]:
        """The pages of a block of a row in group `g`."""
        pages = self.groups[g].pages
        block_pages = row.tables[g][block * pages : (block + 1) * pages]
        if len(block_pages) < pages:
            raise AssertionError(
                f"{row.name}: the table of group {g} ends before {block}"
            )
        return block_pages

    def _read(self, row: OracleRow, g: int, block: int, slot: int) -> int:
        """The digest of a block after a slot; its pages have to agree."""
        if slot < 0:
            return INITIAL_DIGEST + g
        first, *rest = [self._slot(page, slot) for page in self._pages_of(row, g, block)]
        agree = all(digest == hash((first, k)) for k, digest in enumerate(rest, 1))
        return first if agree else hash((_GARBAGE, first, *rest))

    def _undefine_states(self, *, halfway: bool) -> None:
        """Make the states that dropped plans would have changed or saved undefined."""
        unopened = set[int]()  # rows that have others in them, for all that is known here
        for number, plan in enumerate(self.plans):
            if number or not halfway:
                unopened.update(plan.rows[new_row.index] for new_row in plan.opens)
            for index in self.rows.keys() & {*plan.rows} - unopened:
                for page in self._working(self.rows[index]):
                    self.memory[page] = []
            for save in plan.saves:
                self.memory.update({page: [] for page in save.pages})

    def _working(self, row: OracleRow) -> list[int]:
        """The pages of a row's working state."""
        return row.tables[-1] if self.state_pages else []

    def _state(self, row: OracleRow) -> int:
        """The digest of a row's working state; its pages have to agree."""
        digests = [self._slot(page, 0) for page in self._working(row)]
        first, *rest = digests or [INITIAL_DIGEST]
        agree = all(digest == hash((first, k)) for k, digest in enumerate(rest, 1))
        return first if agree else hash((_GARBAGE, first, *rest))

    def _set_state(self, row: OracleRow, digest: int) -> None:
        for k, page in enumerate(self._working(row)):
            self.memory[page] = [hash((digest, k)) if k else digest]

    def _add_to_state(self, row: OracleRow, token: int) -> tuple[int, ...]:
        """Add the row's next input to its working state; returns that, if it has any."""
        if not self.state_pages:
            return ()
        digest = hash((self._state(row), token, row.next))
        self._set_state(row, digest)
        return (digest,)

    def _slot(self, page: int, slot: int) -> int:
        slots = self.memory.get(page, ())
        return (
            slots[slot] if slot < len(slots) else hash((_GARBAGE, page, slot, len(slots)))
        )

    def _truncated(self, page: int, slot: int) -> list[int]:
        """The digests of a page, whose next one is that of `slot`."""
        slots = self.memory.setdefault(page, [])
        del slots[slot:]
        slots += [hash((_GARBAGE, page, gap)) for gap in range(len(slots), slot)]
        return slots


def _is_set(bits: bytes, index: int) -> bool:
    """Whether a bit is 1: bits after the last byte are not."""
    return index >> 3 < len(bits) and bool(bits[index >> 3] >> (index & 7) & 1)

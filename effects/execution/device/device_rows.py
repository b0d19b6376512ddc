"""The device's state of each row between steps, and the words that change it.

All of it is in one int32 arena (`kernels/rows.py`), so a step's changes are (index,
value) pairs that are sent with the step's own inputs in one copy.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Final

import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray

from minfer.kernels.row_state import Penalties, RowTensors
from minfer.kernels.sample_reference import SamplingValues
from minfer.records.adapters import NO_SLOT
from minfer.records.config import CacheGroup, EngineConfig
from minfer.records.plan import NewRow
from minfer.records.speculation import REJECTION
from minfer.sampling.logits import is_shaped
from minfer.sampling.params import ROW_FIELDS
from minfer.sampling.reference_sampler import RowSampling, is_greedy, lowest, stream
from minfer.speculate.rejection import Streams

Words = NDArray[np.int32]
EMPTY = np.empty(0, np.int32)
FILTERED, SCORED, SHAPED = 1, 2, 4  # bits of a row's `SamplingNeeds`
STREAMS: Final = ("stream", "draft_stream", "coins")  # columns; often only the first


def aligned(words: int) -> int:
    """Round up to 16 bytes: pointers that are not aligned need kernels of their own."""
    return -(-words // 4) * 4


@frozen
class SamplingNeeds:
    """What sampling has to do for at least one row of a step, besides drawing."""

    filtered: bool  # filter tokens: top-k, top-p, min-p, typical-p
    scored: bool  # log-probabilities
    shaped: bool = False  # change logits: see `minfer.sampling.logits`


def is_filtered(sampling: RowSampling, vocab: int) -> bool:
    """Returns whether any of the `vocab` tokens may be filtered out."""
    likeliest = sampling.top_p < 1 or 0 < sampling.top_k < vocab or sampling.min_p > 0
    narrow = likeliest or sampling.typical_p < 1
    return narrow and not is_greedy(sampling)


def requested_logprobs(sampling: RowSampling, vocab: int) -> int:
    """Returns 1 + the number of likeliest tokens whose log-probabilities are requested;
    0: not even that of the sampled token.
    """
    return 0 if sampling.logprobs is None else 1 + min(sampling.logprobs, vocab)


def row_values(sampling: RowSampling, vocab: int) -> dict[str, float]:
    """Returns what a device row holds for each field of
    `minfer.sampling.params.RowValues`.

    Values of a field that mean the same (no effect) become one word.
    """
    return {
        "temperature": 0.0 if is_greedy(sampling) else sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k if 0 < sampling.top_k < vocab else 0,
        "min_p": -lowest(sampling.min_p),  # as -log; inf: all
        "typical_p": sampling.typical_p,
        "repetition_penalty": sampling.repetition_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "logprobs": requested_logprobs(sampling, vocab),
    }


def words_of(sampling: RowSampling, vocab: int) -> Words:
    """Returns `row_values` as words, in the order of the fields."""
    values = row_values(sampling, vocab)
    words = [
        np.array([values[name]], row_field.word) for name, row_field in ROW_FIELDS.items()
    ]
    return np.concatenate([word.view(np.int32) for word in words])


def _sizes(
    count: int,
    table_words_per_row: int,
    state_pages: int,
    noise_columns: Sequence[str],
    *,
    adapters: bool,
) -> dict[str, int]:
    """Returns the size in words of each column of the arena, for `count` rows, the
    scratch row included.
    """
    sizes = {
        **dict.fromkeys(noise_columns, 2 * count),
        "last": count,
        "previous": count,
        "next": count,
        **dict.fromkeys(ROW_FIELDS, count),
        "table": count * table_words_per_row,
        "state_table": 2 * count * state_pages,
        "adapter_slot": count * adapters,
        "batch": 2 * count + 64,  # with room for padding
        "sampling_split": 2 * aligned(2 * count + 64),
    }
    return {name: aligned(size) for name, size in sizes.items()}


class DeviceRows:
    """The rows of an engine, and a scratch row, the last one, that pads batches."""

    def __init__(
        self,
        rows: int,
        blocks: int,
        vocab: int,
        device: torch.device,
        *,
        rejects: bool = False,
        groups: tuple[CacheGroup, ...] = (CacheGroup(),),
        state_pages: int = 0,
        adapters: bool = False,
    ) -> None:
        """`rows` of the engine; `blocks` of a table. `rejects`: drafts are accepted by
        rejection sampling. `groups` of layers that keep blocks: each has a table for each
        page of a block. `state_pages` of a state, if there are recurrent layers.
        `adapters`: rows may have one.
        """
        self.scratch = rows
        self.vocab = vocab
        self.blocks = blocks
        count = rows + 1
        self.streams = STREAMS if rejects else STREAMS[:1]
        self.groups = groups
        pages = [group.pages for group in groups]
        self.first_tables = [0, *accumulate(pages)]  # of each group
        tables = self.first_tables[-1]
        self.state_pages = state_pages
        sizes = _sizes(
            count, tables * blocks, state_pages, self.streams, adapters=adapters
        )
        starts = np.cumsum([0, *sizes.values()]).tolist()
        self.column_starts = dict(zip(sizes, starts, strict=False))
        self.arena = torch.zeros(starts[-1], dtype=torch.int32, device=device)
        columns = {
            name: self.arena[start : start + size]
            for (name, size), start in zip(sizes.items(), starts, strict=False)
        }
        self.last = columns["last"]  # tokens
        self.previous = columns["previous"]  # tokens before the last, if they are kept
        self.next = columns["next"]  # positions of the last tokens
        # Noise streams of `minfer.sampling.reference_sampler.stream`; with rejection
        # sampling also those of drafts and of coins, as in `minfer.speculate.rejection`.
        noise = {name: columns[name].view(torch.int64) for name in self.streams}
        self.stream = noise["stream"]
        self.draft_stream, self.coins = noise.get("draft_stream"), noise.get("coins")
        # Sampling values, as `row_values` returns them, in the dtype of each field's
        # word.
        values = {
            name: columns[name].view(getattr(torch, row_field.word))
            for name, row_field in ROW_FIELDS.items()
        }
        self.sampling = SamplingValues(
            temperature=values["temperature"],  # 0: greedy
            top_k=values["top_k"],
            top_p=values["top_p"],
            deepest=values["min_p"],
            typical_p=values["typical_p"],
        )
        self.penalties = Penalties(
            values["repetition_penalty"],
            values["frequency_penalty"],
            values["presence_penalty"],
        )
        self.requested_logprobs = values["logprobs"]  # as `requested_logprobs` returns it
        self.table = columns["table"][: tables * count * blocks].view(
            tables, count, blocks
        )
        # The pages of each row's working state; then, for each row, those of the state
        # that is kept inside its chunk.
        self.state_table = columns["state_table"][: 2 * count * state_pages].view(
            2 * count, state_pages
        )
        # The slot of each row's adapter; None: no row has one.
        self.adapter_slots = columns["adapter_slot"][:count] if adapters else None
        if self.adapter_slots is not None:
            self.adapter_slots.fill_(NO_SLOT)
        self.state = RowTensors(self.last, self.next, self.table, self.scratch)
        self.batch = columns["batch"]  # decode rows, in the step's order
        # [2, ...]: of these, rows sampled now, and rows with deferred sampling; else
        # scratch
        self.sampling_split = columns["sampling_split"].view(2, -1)
        # Indices into the arena, and the words to write there.
        self.changes: list[tuple[Words, Words]] = []
        # Host state: the rows' owners, how often a row was opened, and a bit of each row
        # for each of `SamplingNeeds`.
        self.owners: list[NewRow | None] = [None] * count
        self.opened = 0
        self._need_bits = np.zeros(rows, np.uint8)

    @classmethod
    def of(
        cls, config: EngineConfig, length: int, vocab: int, device: torch.device
    ) -> "DeviceRows":
        """Returns an engine's rows, for sequences of up to `length` tokens."""
        spec_config, blocks = config.speculation, -(-length // config.block_size)
        rejects = spec_config is not None and spec_config.rule == REJECTION
        rows = cls(
            config.max_num_seqs,
            blocks,
            vocab,
            device,
            rejects=rejects,
            groups=config.block_groups,
            state_pages=config.state_pages,
            adapters=config.adapter_slots > 0,
        )
        # Pages that no row owns: one, and those of a state behind it.
        rows.table[:, rows.scratch] = config.num_blocks
        first_page = config.num_blocks + 1
        rows.state_table[rows.scratch] = torch.arange(
            first_page, first_page + config.state_pages
        )
        return rows

    def set_table(
        self, row: int, first_page: int, pages: tuple[int, ...], group: int = 0
    ) -> None:
        """Set entries of a row's block table in a group from page `first_page` on."""
        pages_per_block, first_table = self.groups[group].pages, self.first_tables[group]
        values = np.array(pages, np.int32)
        for page in range(pages_per_block):
            # Pages at, at + 1, ... are pages at % each, ... of their blocks.
            skip = (page - first_page) % pages_per_block
            table = first_table + page
            start = (table * (self.scratch + 1) + row) * self.blocks + (
                first_page + skip
            ) // pages_per_block
            self._set(self.column_starts["table"] + start, values[skip::pages_per_block])

    def set_batch(self, rows: tuple[int, ...], size: int) -> None:
        """Set the decode rows, padded to `size`."""
        padded = np.full(size, self.scratch, np.int32)
        padded[: len(rows)] = rows
        self._set(self.column_starts["batch"], padded)

    def set_sampling_split(self, lines: Words) -> None:
        """Set which decode rows are sampled now, and which are deferred: [2, size] rows,
        the scratch row for none.
        """
        width = self.sampling_split.shape[1]
        for line, rows in enumerate(lines):
            self._set(self.column_starts["sampling_split"] + line * width, rows)

    def set_last(self, row: int, token: int) -> None:
        """Set a row's last token, the input of its next decode step."""
        self._set(self.column_starts["last"] + row, np.array([token], np.int32))

    def set_inputs(
        self, rows: Sequence[int], tokens: Sequence[int], positions: Sequence[int]
    ) -> None:
        """Set the next input tokens of decode rows, and their positions."""
        row_ids = np.array(rows, np.int32)
        for name, values in (("last", tokens), ("next", positions)):
            self.changes.append(
                (self.column_starts[name] + row_ids, np.array(values, np.int32))
            )

    def open(self, row: int, opened: NewRow) -> None:
        """Set all state of a row for a new owner."""
        sampling = opened.sampling
        self.owners[row] = opened
        self.opened += 1
        self._need_bits[row] = (
            FILTERED * is_filtered(sampling, self.vocab)
            | SCORED * (requested_logprobs(sampling, self.vocab) > 0)
            | SHAPED * is_shaped(sampling)
        )
        starts, noise = self.column_starts, [stream(sampling.seed, sampling.sample)]
        if self.coins is not None:
            other_streams = Streams.of(sampling.seed, sampling.sample)
            noise += [other_streams.draft, other_streams.coins]
        places = [
            starts[name] + 2 * row + half for name in self.streams for half in (0, 1)
        ]
        places += [starts[name] + row for name in ROW_FIELDS]
        halves = np.array(noise, np.uint64).view(np.int32)
        words = np.concatenate([halves, words_of(sampling, self.vocab)])
        self.changes.append((np.array(places, np.int32), words))
        for group in range(len(self.groups)):
            self.set_table(row, 0, opened.tables[group], group)
        if self.adapter_slots is not None:
            place = self.column_starts["adapter_slot"] + row
            self._set(place, np.array([opened.adapter_slot], np.int32))
        if self.state_pages:
            start = self.column_starts["state_table"] + row * self.state_pages
            self._set(start, np.array(self.state_of(row), np.int32))

    @property
    def saved_offset(self) -> int:
        """The distance in `state_table` from the line of a row's working state to that of
        the state that is kept inside its chunk.
        """
        return self.scratch + 1

    def set_saved(self, row: int, pages: tuple[int, ...]) -> None:
        """Set the pages of the state that a step keeps inside the row's chunk."""
        line = row + self.saved_offset
        start = self.column_starts["state_table"] + line * self.state_pages
        self._set(start, np.array(pages, np.int32))

    def state_of(self, row: int) -> tuple[int, ...]:
        """Returns the pages of the working state of a row that has an owner."""
        owner = self.owners[row]
        return () if owner is None else owner.tables[-1][: self.state_pages]

    def has_adapters(self, rows: Sequence[int]) -> bool:
        """Returns whether at least one of these rows has an adapter."""
        if self.adapter_slots is None:
            return False
        owners = (self.owners[row] for row in rows)
        return any(owner and owner.adapter_slot != NO_SLOT for owner in owners)

    def sampling_needs(self, rows: Sequence[int]) -> SamplingNeeds:
        """Returns what sampling has to do for at least one of these rows."""
        bits = int(np.bitwise_or.reduce(self._need_bits[list(rows)]))
        return SamplingNeeds(
            bool(bits & FILTERED), bool(bits & SCORED), bool(bits & SHAPED)
        )

    def _set(self, first: int, words: Words) -> None:
        self.changes.append((np.arange(first, first + len(words), dtype=np.int32), words))

    def take(self) -> list[Words]:
        """Returns the changes, all indices and then all values, and clears them."""
        places, values = zip(*self.changes, strict=True) if self.changes else ((), ())
        self.changes = []
        return [*places, *values]

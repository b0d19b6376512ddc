"""States of rows in pages, for tests of recurrent layers' kernels."""

import math

import torch
from torch import Tensor

from minfer.kernels.paged_states import PagedUnits, gather_states
from minfer.kernels.state_work import DraftSpacing, StateChunks, StateWork

from .conftest import ints

PAGES = 40
FIRST_UNIT, FIRST_PAGE = 2, 1  # units of another layer, and a page of another part
PER_PAGE = 3  # units
GAP = 8  # elements of a page behind its units
SPARE = 3  # the largest possible count is larger than the largest


class PagedRows:
    """The states of some rows, all NaN, in pages that are larger than their units."""

    def __init__(
        self, rows: int, units: int, *shape: int, dtype: torch.dtype, device: str
    ):
        columns = FIRST_PAGE + math.ceil((FIRST_UNIT + units) / PER_PAGE)
        line = PER_PAGE * math.prod(shape)
        data = torch.full((PAGES, line + GAP), math.nan, dtype=dtype, device=device)
        self.pages = data[:, :line].view(PAGES, PER_PAGE, *shape)
        self.units = PagedUnits(self.pages, FIRST_UNIT, units, FIRST_PAGE)
        draw = torch.Generator().manual_seed(rows)
        table = torch.randperm(PAGES, generator=draw)[: rows * columns]
        self.table = ints(table.view(rows, columns), device)
        self.device = device

    def work(
        self, decode: dict[int, int], *chunks: tuple[int, int, int], padding: int = 0
    ) -> StateWork:
        """Returns the work of decode rows {row: position} and of chunks (row, start,
        count), which are packed without gaps, with some padding behind.
        """
        rows, starts = (
            ints([*column], self.device) for column in (decode, decode.values())
        )
        if not chunks:
            return StateWork(self.table, rows, starts, None)
        counts = [count for _, _, count in chunks]
        offsets = [len(decode) + sum(counts[:i]) for i in range(len(counts))]
        lines = [(*chunk, offset) for chunk, offset in zip(chunks, offsets, strict=True)]
        lines += [(0, 0, 0, 0)] * padding
        table_rows, begins, sizes, places = ints(lines, self.device).T.contiguous()
        in_chunks = StateChunks(table_rows, begins, sizes, places, max(counts) + SPARE)
        return StateWork(self.table, rows, starts, in_chunks)

    def drafted_work(
        self, drafted: dict[int, tuple[int, int]], decode: dict[int, int], places: int
    ) -> StateWork:
        """Returns the work of rows with drafts {row: (position, inputs)}, and of decode
        rows {row: position}: first an input of each, then a line of the former for each
        of so many `places`.
        """
        count, decode_rows = len(drafted), len(drafted) + len(decode)
        starts, counts = (
            ints(x, self.device) for x in zip(*drafted.values(), strict=True)
        )
        chunks = StateChunks(
            ints([*drafted], self.device),
            starts,
            counts,
            ints(range(count), self.device),
            longest=1 + places,
            spacing=DraftSpacing(lead=decode_rows - count, stride=count),
        )
        rows = ints([*decode], self.device)
        positions = ints([*decode.values()], self.device)
        return StateWork(
            self.table, rows, positions, None, drafted=chunks, first_token=count
        )

    def states(self, *rows: int) -> Tensor:
        """Returns the states of rows, on the CPU: [rows, units, *shape]."""
        return gather_states(self.units, self.table, ints(rows, self.device)).cpu()

    @staticmethod
    def interleaved(drafted: list[Tensor], decode: list[Tensor]) -> Tensor:
        """Returns inputs as `drafted_work` packs them: those of rows with drafts [places
        + 1, ...], all in the same number, and one of each decode row [1, ...].
        """
        firsts, drafts = [x[:1] for x in drafted], torch.stack(drafted, 1)[1:]
        return torch.cat((*firsts, *decode, drafts.flatten(0, 1)))

    def written(self) -> int:
        """Returns the number of elements in the cache that are not NaN."""
        return int((~self.pages.isnan()).sum())

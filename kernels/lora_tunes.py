"""Constants of the kernels of lora.py, by shapes alone, so that a CUDA graph holds for
any adapters of its rows. They follow from the arithmetic below, and are not measured yet:
`bench/lora_gpu.py --parts kernels --sweep` tries others.

A program should have some 8 to 32 KB in flight, and few rows are few programs: so the
inputs of a shrink are split. Each program of the expand reads the sums of all splits.
Constants change at the numbers of rows in `BOUNDS` alone: a kernel is compiled for each
of their combinations, before it is needed (dummy_steps.py).
"""

from typing import Final, NamedTuple

SINGLE_ROWS: Final = 8  # up to as many rows, each has programs of its own
TILE_ELEMENTS: Final = 8192  # of A or B that a program loads at once
MIN_SIZE, MAX_SINGLE_SIZE, MAX_TILED_SIZE = 32, 512, 128  # of a pass, and of columns


class LoraTune(NamedTuple):
    """The tiling of a shrink and an expand."""

    tile: int  # rows of a program; 1: without tensor cores
    splits: int  # of the inputs of a shrink
    depth: int  # inputs of a pass
    columns: int  # of a program of the expand
    warps: int
    stages: int


class RowsEntry(NamedTuple):
    """What depends on the number of rows."""

    max_rows: float
    tile: int
    splits: int


ROWS_TABLE: Final = (
    RowsEntry(SINGLE_ROWS, 1, 16),
    RowsEntry(64, 16, 8),
    RowsEntry(512, 16, 4),
    RowsEntry(float("inf"), 64, 1),
)
BOUNDS: Final = frozenset(int(entry.max_rows) for entry in ROWS_TABLE[:-1])


def tune_of(rows: int, inputs: int, lanes: int) -> LoraTune:
    """Returns the constants for `rows` of a matrix with `inputs`; `lanes` is the rank
    that slots have room for, as a power of two.
    """
    entry = next(entry for entry in ROWS_TABLE if rows <= entry.max_rows)
    largest = MAX_SINGLE_SIZE if entry.tile == 1 else MAX_TILED_SIZE
    size = max(MIN_SIZE, min(largest, TILE_ELEMENTS // lanes))
    splits = min(entry.splits, -(-inputs // size))
    return LoraTune(entry.tile, splits, size, size, warps=4, stages=2)


def max_tiles(rows: int, groups: int, tile: int) -> int:
    """Returns the most tiles of `tile` rows for any adapters: a group has at most one
    that is not full, and none is empty.
    """
    return min(rows, min(rows, groups) + rows // tile)

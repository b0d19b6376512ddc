"""Constants of the kernels of lora.py, by shapes alone, so that a CUDA graph holds for
any adapters of its rows. They follow from the arithmetic below, and are not measured yet:
`bench/lora_gpu.py --parts kernels --sweep` tries others.

A program should have some 8 to 32 KB in flight, and there should be two programs for each
of 132 processors where there are few rows: so the inputs of a shrink are split.
"""

from typing import Final, NamedTuple

PROGRAMS: Final = 264  # of a launch: fewer leave processors idle
MAX_SPLITS: Final = 8  # each program of the expand reads the sums of all of them
TILE_ELEMENTS: Final = 8192  # of A or B that a program loads at once
MIN_COLUMNS: Final = 64
SINGLE_ROWS: Final = 8  # up to so many rows, each has programs of its own
FEW_ROWS: Final = 512  # up to so many, tiles have 16 rows, else 64


class LoraTune(NamedTuple):
    """The tiling of a shrink and an expand."""

    tile: int  # rows of a program; 1: without tensor cores
    splits: int  # of the inputs of a shrink
    depth: int  # inputs of a pass
    columns: int  # of a program of the expand
    warps: int
    stages: int


def tune_of(rows: int, groups: int, parts: int, inputs: int, lanes: int) -> LoraTune:
    """Returns the constants for `rows` of up to `groups` adapters, of a matrix with
    `parts` A's of `inputs`; `lanes` is the rank that slots have room for, as a power of
    two.
    """
    tile = 1 if rows <= SINGLE_ROWS else 16 if rows <= FEW_ROWS else 64
    programs = parts * max_tiles(rows, groups, tile)
    depth = max(32, min(512 if tile == 1 else 128, TILE_ELEMENTS // lanes))
    passes = -(-inputs // depth)
    splits = max(1, min(MAX_SPLITS, passes, -(-PROGRAMS // programs)))
    columns = max(MIN_COLUMNS, min(512 if tile == 1 else 128, TILE_ELEMENTS // lanes))
    return LoraTune(tile, splits, depth, columns, warps=4, stages=2)


def max_tiles(rows: int, groups: int, tile: int) -> int:
    """Returns the most tiles of `tile` rows for any adapters: a group has at most one
    that is not full, and none is empty.
    """
    return min(rows, min(rows, groups) + rows // tile)

"""Constants of the kernels of experts.py, and which of its two paths is taken: by shapes
alone, so that a CUDA graph holds for any routing.

Measured at the shapes of Qwen3-30B-A3B and DeepSeek-V2-Lite (H100, 2026-11-27): the bytes
of the experts hit at 2.5 TB/s for one token, 2.9 from 8 on and 3.0 from 16 to 64.
"""

from typing import Final, NamedTuple

from minfer.kernels.leaves import Experts


class FewTune(NamedTuple):
    """The tiling of gates of pairs, one a program."""

    columns: int  # of a program
    depth: int  # of a pass along the summed dimension
    warps: int
    stages: int


class DownTune(NamedTuple):
    """The tiling of sums of a token's pairs."""

    columns: int  # of a program
    depth: int  # of a pass along the summed dimension of an expert
    warps: int
    ahead: int  # passes whose weights are held before the gated products are there


class GroupedTune(NamedTuple):
    """The tiling of a product of an expert's rows."""

    columns: int  # of a program; gated, it reads two lines of weights for each
    depth: int  # of a pass along the summed dimension
    warps: int
    stages: int
    group: int  # tiles of rows whose programs of the same columns run together
    swapped: bool  # weights are the first operand of the tensor cores


class Few(NamedTuple):
    """Constants for few tokens."""

    gate_up: FewTune
    down: DownTune


class Grouped(NamedTuple):
    """Constants for many tokens."""

    rows: int  # of a tile
    gate_up: GroupedTune
    down: GroupedTune


class FewEntry(NamedTuple):
    """A row of the table: its upper limit, and the tune."""

    inter: float
    tune: Few


class GroupedEntry(NamedTuple):
    """A row of the table: its upper limit, and the tune."""

    mean: float  # pairs an expert
    tune: Grouped


Tune = Few | Grouped
# Few tokens: one, or at most so many pairs an expert, so that few experts are read twice,
# the second time from the cache.
FEW_SHARE: Final = 0.4
# Of both tables, the first row that fits is used.
FEW: Final = [
    # columns, depth, warps, stages; columns, depth, warps, ahead
    FewEntry(1024, Few(FewTune(1, 2048, 1, 1), DownTune(1, 256, 1, 16))),
    FewEntry(4096, Few(FewTune(1, 2048, 1, 1), DownTune(1, 512, 1, 12))),
    FewEntry(float("inf"), Few(FewTune(1, 1024, 1, 1), DownTune(1, 4096, 4, 4))),
]
GROUPED: Final = [
    # columns, depth, warps, stages, group, swapped
    GroupedEntry(
        8,
        Grouped(
            16,
            GroupedTune(32, 128, 4, 4, 1, True),
            GroupedTune(64, 128, 4, 4, 1, True),
        ),
    ),
    GroupedEntry(
        24,
        Grouped(
            32,
            GroupedTune(32, 128, 4, 4, 1, True),
            GroupedTune(64, 128, 4, 4, 1, True),
        ),
    ),
    GroupedEntry(
        64,
        Grouped(
            64,
            GroupedTune(64, 64, 4, 4, 8, False),
            GroupedTune(128, 64, 4, 4, 8, False),
        ),
    ),
    GroupedEntry(
        float("inf"),
        Grouped(
            128,
            GroupedTune(128, 64, 8, 4, 8, False),
            GroupedTune(128, 64, 8, 4, 8, False),
        ),
    ),
]
# Of float32, which no tensor cores multiply.
WIDE: Final = Grouped(
    16, GroupedTune(16, 32, 4, 2, 1, False), GroupedTune(32, 32, 4, 2, 1, False)
)
# Of quantized experts, start values from arithmetic until they are measured: a warp loads
# at least 256 bytes of a line, and rows are the first operand, so that numbers are
# decoded where the tensor cores take them.
FEW_NARROW: Final = {
    8: Few(FewTune(2, 1024, 1, 1), DownTune(2, 256, 1, 12)),
    4: Few(FewTune(2, 1024, 1, 1), DownTune(2, 1024, 1, 6)),
}
GROUPED_NARROW: Final = [
    GroupedEntry(
        8,
        Grouped(
            16,
            GroupedTune(32, 128, 4, 4, 1, False),
            GroupedTune(64, 128, 4, 4, 1, False),
        ),
    ),
    GroupedEntry(
        24,
        Grouped(
            32,
            GroupedTune(32, 128, 4, 4, 1, False),
            GroupedTune(64, 128, 4, 4, 1, False),
        ),
    ),
    *GROUPED[2:],
]


def grouped_from(top_k: int, experts: int) -> int:
    """The tokens from which pairs are grouped by their experts."""
    return max(1, int(FEW_SHARE * experts / top_k)) + 1


def tune_of(tokens: int, top_k: int, experts: Experts, *, wide: bool = False) -> Tune:
    """The constants for so many tokens, of so many experts each. wide: activations are
    float32.
    """
    by = experts.down
    mean = tokens * top_k / len(by.weight)
    if tokens < grouped_from(top_k, len(by.weight)):
        if not by.scheme.is_plain:
            return FEW_NARROW[by.scheme.bits]
        return next(row.tune for row in FEW if by.inputs <= row.inter)
    if wide or by.weight.element_size() > 2:
        return WIDE
    table = GROUPED if by.scheme.is_plain else GROUPED_NARROW
    return next(row.tune for row in table if mean <= row.mean)

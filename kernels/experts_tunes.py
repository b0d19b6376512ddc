"""Constants of the kernels of experts.py, and which of its two paths is taken: by shapes
alone, so that a CUDA graph holds for any routing.

Measured at the shapes of Qwen3-30B-A3B and DeepSeek-V2-Lite (H100, 2026-11-27): the bytes
of the experts hit at 2.5 TB/s for one token, 2.9 from 8 on and 3.0 from 16 to 64.
"""

from typing import Final, NamedTuple

from minfer.kernels.leaves import FP8_BLOCKS, Experts, Linear
from minfer.kernels.target import capability


class GateUpTune(NamedTuple):
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


class FewTokensTune(NamedTuple):
    """Constants for few tokens."""

    gate_up: GateUpTune
    down: DownTune


class ManyTokensTune(NamedTuple):
    """Constants for many tokens."""

    rows: int  # of a tile
    gate_up: GroupedTune
    down: GroupedTune
    # Activations are rounded to the weights' 8 bits, a scale for each group of them.
    rounded: bool = False


class FewEntry(NamedTuple):
    """A row of the table: its upper limit, and the tune."""

    inter: float
    tune: FewTokensTune


class GroupedEntry(NamedTuple):
    """A row of the table: its upper limit, and the tune."""

    mean: float  # pairs an expert
    tune: ManyTokensTune


ExpertsTune = FewTokensTune | ManyTokensTune
# Few tokens: one, or at most this many pairs an expert, so that few experts are read
# twice, the second time from the cache.
FEW_PAIRS_PER_EXPERT: Final = 0.4
# Of both tables, the first row that fits is used.
FEW_TOKENS_TABLE: Final = [
    # columns, depth, warps, stages; columns, depth, warps, ahead
    FewEntry(1024, FewTokensTune(GateUpTune(1, 2048, 1, 1), DownTune(1, 256, 1, 16))),
    FewEntry(4096, FewTokensTune(GateUpTune(1, 2048, 1, 1), DownTune(1, 512, 1, 12))),
    FewEntry(
        float("inf"), FewTokensTune(GateUpTune(1, 1024, 1, 1), DownTune(1, 4096, 4, 4))
    ),
]
GROUPED_TABLE: Final = [
    # columns, depth, warps, stages, group, swapped
    GroupedEntry(
        8,
        ManyTokensTune(
            16,
            GroupedTune(32, 128, 4, 4, 1, True),
            GroupedTune(64, 128, 4, 4, 1, True),
        ),
    ),
    GroupedEntry(
        24,
        ManyTokensTune(
            32,
            GroupedTune(32, 128, 4, 4, 1, True),
            GroupedTune(64, 128, 4, 4, 1, True),
        ),
    ),
    GroupedEntry(
        64,
        ManyTokensTune(
            64,
            GroupedTune(64, 64, 4, 4, 8, False),
            GroupedTune(128, 64, 4, 4, 8, False),
        ),
    ),
    GroupedEntry(
        float("inf"),
        ManyTokensTune(
            128,
            GroupedTune(128, 64, 8, 4, 8, False),
            GroupedTune(128, 64, 8, 4, 8, False),
        ),
    ),
]
# Of float32, which no tensor cores multiply.
FLOAT32_TUNE: Final = ManyTokensTune(
    16, GroupedTune(16, 32, 4, 2, 1, False), GroupedTune(32, 32, 4, 2, 1, False)
)
# Of quantized experts, start values from arithmetic until they are measured: a warp loads
# at least 512 bytes of a line, and rows are the first operand, so that numbers are
# decoded where the tensor cores take them.
QUANTIZED_FEW_TOKENS: Final = {
    8: FewTokensTune(GateUpTune(2, 1024, 1, 1), DownTune(2, 512, 1, 6)),
    4: FewTokensTune(GateUpTune(2, 1024, 1, 1), DownTune(2, 1024, 1, 6)),
}
QUANTIZED_GROUPED_TABLE: Final = [
    GroupedEntry(
        8,
        ManyTokensTune(
            16,
            GroupedTune(32, 128, 4, 4, 1, False),
            GroupedTune(64, 128, 4, 4, 1, False),
        ),
    ),
    GroupedEntry(
        24,
        ManyTokensTune(
            32,
            GroupedTune(32, 128, 4, 4, 1, False),
            GroupedTune(64, 128, 4, 4, 1, False),
        ),
    ),
    *GROUPED_TABLE[2:],
]
# Of FP8 in blocks, at the shape of Qwen3-Next-80B-A3B with the shared expert as one more
# (H200, 2026-12-01, `bench.fp8_blocks_tunes_gpu --paths`): us of a layer, beside experts
# grouped and the bytes' floor: 15 (28, 8) for a token, 72 (86, 56) for 8, 126 (134, 101)
# for 16.
FP8_BLOCKS_FEW_TOKENS: Final = FewTokensTune(
    GateUpTune(4, 2048, 2, 1), DownTune(4, 512, 1, 6)
)
# Rows are rounded to 8 bits, of which the tensor cores multiply twice as many. A tile of
# gates and ups has a group of what they give. Measured (H200, 2026-12-01): us of a layer,
# beside the tunes above and the bytes' floor: 312 (341, 274) for 64 tokens, 429
# (466, 376) for 256, 1,514 (7,395, 378) for 8,192.
ROUNDED_GROUP: Final = 128
ROUNDED_GROUPED_TABLE: Final = [
    GroupedEntry(
        mean,
        ManyTokensTune(
            rows,
            GroupedTune(ROUNDED_GROUP, 128, 8, 3, group, False),
            GroupedTune(128, 128, 4, 3, group, False),
            rounded=True,
        ),
    )
    for mean, rows, group in [(12, 16, 1), (32, 32, 1), (float("inf"), 64, 8)]
]
FP8_PRODUCTS: Final = (8, 9)  # the first GPUs whose tensor cores multiply FP8


def grouped_from(top_k: int, experts: int) -> int:
    """The tokens from which pairs are grouped by their experts."""
    return max(1, int(FEW_PAIRS_PER_EXPERT * experts / top_k)) + 1


def tune_of(
    tokens: int,
    top_k: int,
    experts: Experts,
    *,
    is_float32: bool = False,
    rounds: bool = True,
) -> ExpertsTune:
    """The constants for `tokens` tokens, of `top_k` experts each. is_float32: activations
    are. rounds: they may be rounded.
    """
    down = experts.down
    mean = tokens * top_k / len(down.weight)
    if tokens < grouped_from(top_k, len(down.weight)):
        if down.scheme == FP8_BLOCKS:
            return FP8_BLOCKS_FEW_TOKENS
        if not down.scheme.is_plain:
            return QUANTIZED_FEW_TOKENS[down.scheme.bits]
        return next(row.tune for row in FEW_TOKENS_TABLE if down.inputs <= row.inter)
    if is_float32 or down.weight.element_size() > 2:
        return FLOAT32_TUNE
    table = GROUPED_TABLE if down.scheme.is_plain else QUANTIZED_GROUPED_TABLE
    if rounds and _rounds_activations(down):
        table = ROUNDED_GROUPED_TABLE
    return next(row.tune for row in table if mean <= row.mean)


def _rounds_activations(down: Linear) -> bool:
    """Whether activations are rounded to 8 bits, in groups, where there are many."""
    return (
        down.scheme.activations == "groups"
        and down.scheme.group == ROUNDED_GROUP
        and down.inputs % ROUNDED_GROUP == down.weight.shape[1] % ROUNDED_GROUP == 0
        and capability(down.weight.device) >= FP8_PRODUCTS
    )

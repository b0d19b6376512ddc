"""Constants of the kernels of mla.py and expanded_latents.py, from compiled kernels; not
yet measured.
"""

from typing import Final, NamedTuple

from minfer.kernels.attention_tunes import (
    CAPABILITIES_WITH_99_KB,
    WIDEST_HEAD,
    PrefillTune,
    num_splits,
    padded,
)
from minfer.kernels.target import HOPPER, Capability

MAX_ROWS: Final = 64  # (query, head) pairs of a program
MERGE_VALUES: Final = 2048  # values that a program of `merge_ranges` loads at once


class LatentTune(NamedTuple):
    """The tiling of attention over a latent cache."""

    rows: int  # (query, head) pairs of a program
    tile: int  # keys loaded at once
    warps: int
    stages: int


# By rows. With latents of 512 and rotated keys of 64 in 2 bytes, 16 rows take 158 KB of
# shared memory, 32 take 104 KB and 64 take 172 KB.
TUNES_16_BIT: Final = {
    16: LatentTune(16, 64, 8, 3),
    32: LatentTune(32, 32, 8, 3),
    64: LatentTune(64, 32, 8, 3),
}
# Of GPUs with 99 KB for a program, or 163.
SMALL_TUNE_16_BIT: Final = LatentTune(16, 32, 4, 3)  # 86 KB
# float32 products do not use the tensor cores.
TUNE_FLOAT32: Final = LatentTune(16, 16, 4, 2)


# Of expanded latents, with keys of 128 and 64 dimensions and values of 128: 172 KB.
EXPANDED_TUNE: Final = PrefillTune(128, 64, 3)
EXPANDED_SMALL_TUNE: Final = PrefillTune(64, 32, 2)
EXPANDED_TUNE_FLOAT32: Final = PrefillTune(16, 16, 2)


def expanded_tune(size: int, target: Capability) -> PrefillTune:
    """The tiling for expanded latents whose elements have `size` bytes."""
    if size > 2:
        return EXPANDED_TUNE_FLOAT32
    return (
        EXPANDED_SMALL_TUNE
        if target < HOPPER or target in CAPABILITIES_WITH_99_KB
        else EXPANDED_TUNE
    )


def latent_splits(chunks: int, heads: int, max_count: int, max_context: int) -> int:
    """The number of ranges into which contexts are cut, as `num_splits` from shapes
    alone.
    """
    pairs = max_count * heads
    tiles = -(-pairs // min(padded(pairs), MAX_ROWS))
    return num_splits(chunks * tiles, 1, WIDEST_HEAD.dim, max_context)


def latent_tune(size: int, pairs: int, target: Capability) -> LatentTune:
    """The tiling for elements of `size` bytes, and chunks of at most `pairs`
    (query, head) pairs.
    """
    if size > 2:
        return TUNE_FLOAT32
    if target < HOPPER or target in CAPABILITIES_WITH_99_KB:
        return SMALL_TUNE_16_BIT
    return TUNES_16_BIT[min(padded(pairs), MAX_ROWS)]

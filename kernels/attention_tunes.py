"""Constants of the kernels of attention.py, for types and heads, from measurements: how
they tile, and into how many ranges they cut contexts.
"""

from typing import Final, NamedTuple

from torch import Tensor

from minfer.kernels.target import Capability

PROCESSORS: Final = 132  # streaming multiprocessors of an H100 or H200
# Programs for each, by a head's dimensions, if there are `MIN_PROGRAMS_AT_ONCE` before
# contexts are cut: attention then takes 0.5 to 0.85 of the time with one (H200,
# 2026-11-22). Also from 32 on (7B, batch 8), but there a step took 4.88 ms instead of
# 4.69.
PROGRAMS_AT_ONCE: Final = {64: 4, 128: 2, 256: 1, 512: 1}
MIN_PROGRAMS_AT_ONCE: Final = 64
# The largest range: for one long context among many short ones, and to fill the GPU twice
# where contexts are long: 8 of 32,000 tokens take 0.94 of the time of ranges of 8,192 in
# bfloat16, and 0.55 in 8 bits (H100, 2026-11-27).
MAX_RANGE_TOKENS: Final = 4096
MIN_RANGE_TOKENS: Final = 64  # of a range
MAX_SPLITS: Final = 128  # with more, merging takes longer than the ranges


class DecodeTune(NamedTuple):
    """The tiling of attention of one query per sequence."""

    tile: int  # keys loaded at once
    warps: int
    stages: int


class PrefillTune(NamedTuple):
    """The tiling of attention of chunks. 8 warps from `wide` rows on, else 4."""

    rows: int  # (query, head) pairs of a program, at most
    tile: int  # keys loaded at once
    stages: int
    wide: int = 128

    def warps(self, rows: int) -> int:
        """Warps of a program with `rows` rows."""
        return 8 if rows >= self.wide else 4


class HeadSize(NamedTuple):
    """The properties on which the constants depend."""

    bytes: int  # of a cached element; 4 if queries are float32, whatever the cache
    dim: int  # of a head, rounded to those of the tables: 64, 128, 256 or 512


# float32 products do not use the tensor cores: small tiles, or the sums do not fit in the
# registers.
DECODE: Final = {
    # tile, warps, stages
    HeadSize(2, 64): DecodeTune(64, 4, 4),
    HeadSize(2, 128): DecodeTune(64, 4, 3),
    HeadSize(2, 256): DecodeTune(32, 4, 3),
    HeadSize(2, 512): DecodeTune(16, 4, 2),
    HeadSize(4, 64): DecodeTune(32, 4, 3),
    HeadSize(4, 128): DecodeTune(16, 4, 3),
    HeadSize(4, 256): DecodeTune(16, 4, 3),
    HeadSize(4, 512): DecodeTune(16, 4, 2),
    # Of 8 bits. 128 dimensions: 8 contexts of 32,000 tokens take 0.60 (FP8) and 0.65
    # (INT8) of the time of bfloat16, 64 of 2,048 tokens 0.6 (H100, 2026-11-27).
    HeadSize(1, 64): DecodeTune(128, 4, 4),
    HeadSize(1, 128): DecodeTune(128, 4, 3),
    HeadSize(1, 256): DecodeTune(64, 4, 3),
    HeadSize(1, 512): DecodeTune(32, 4, 2),
}
PREFILL: Final = {
    # rows, tile, stages
    HeadSize(2, 64): PrefillTune(128, 64, 3),
    HeadSize(2, 128): PrefillTune(128, 64, 3),
    HeadSize(2, 256): PrefillTune(128, 32, 3),
    HeadSize(2, 512): PrefillTune(64, 32, 2, 64),
    HeadSize(4, 64): PrefillTune(32, 16, 2),
    HeadSize(4, 128): PrefillTune(16, 16, 2),
    HeadSize(4, 256): PrefillTune(16, 16, 2),
    HeadSize(4, 512): PrefillTune(16, 16, 2),
    HeadSize(1, 64): PrefillTune(128, 64, 3),
    HeadSize(1, 128): PrefillTune(128, 128, 3),
    HeadSize(1, 256): PrefillTune(128, 32, 3),
    HeadSize(1, 512): PrefillTune(64, 32, 2, 64),
}
# Programs that a processor holds, by stages, for rows of `DECODE` with a choice: programs
# run in waves, of which the last should be full. Of 128 dimensions, 512 take 0.85 of the
# time with 2 stages, 1,024 take 0.94, but 768 take 1.06 (H200, 2026-11-22).
PROGRAMS_PER_PROCESSOR: Final = {HeadSize(2, 128): {3: 3, 2: 4}}
# The widest heads take 136 KB of shared memory; on GPUs of these compute capabilities a
# program may have 99 KB.
WIDEST_HEAD: Final = HeadSize(2, 256)
WIDE_HEADS: Final = (WIDEST_HEAD, HeadSize(1, 256))
CAPABILITIES_WITH_99_KB: Final = ((8, 6), (8, 9), (12, 0), (12, 1))
WIDE_HEADS_IN_99_KB: Final = PrefillTune(64, 32, 2)
WIDEST_HEADS: Final = (HeadSize(2, 512), HeadSize(1, 512))
WIDEST_HEADS_IN_99_KB: Final = PrefillTune(16, 16, 2)
# Few programs, each of which has a processor: 0.8 of the time with 8 warps.
MAX_FEW_PROGRAMS: Final = 8
FEW_PROGRAMS_WARPS: Final = {HeadSize(1, 128): 8}
# Values that a merging thread loads at once, by a head's dimensions.
MERGE_VALUES: Final = {64: 64, 128: 128, 256: 128, 512: 128}


def head_size_of(q: Tensor, cache: Tensor) -> HeadSize:
    """The key of the constants for these queries [tokens, heads, dim] over a cache."""
    return head_size(q.element_size(), cache.element_size(), q.shape[2])


def head_size(query_bytes: int, cached_bytes: int, dim: int) -> HeadSize:
    """The key of the constants for elements of queries and of a cache of these bytes."""
    wide = query_bytes == 4
    return HeadSize(4 if wide else cached_bytes, table_dim(dim))


def table_dim(dim: int) -> int:
    """A head's dimensions, rounded to those of the tables of constants."""
    return min(max(power_from(dim), 64), 512)


def padded(size: int) -> int:
    """The size padded for the tensor cores: a power of two from 16."""
    return max(16, power_from(size))


def power_from(size: int) -> int:
    """The smallest power of two that is not below a positive size."""
    return 1 << (size - 1).bit_length()


def target_programs(programs: int, dim: int) -> int:
    """How many of `programs` programs a processor should hold at once."""
    return PROGRAMS_AT_ONCE[table_dim(dim)] if programs >= MIN_PROGRAMS_AT_ONCE else 1


def num_splits(batch: int, kv_heads: int, dim: int, max_context: int) -> int:
    """The number of ranges into which contexts are cut: from shapes alone, so the same at
    every replay.

    Enough for the number of programs that a processor runs best, and for no range above
    `MAX_RANGE_TOKENS`; at most one for 64 tokens.
    """
    programs = max(1, batch * kv_heads)
    fill = PROCESSORS * target_programs(programs, dim) // programs
    num_ranges = max(fill, -(-max_context // MAX_RANGE_TOKENS))
    return max(1, min(num_ranges, -(-max_context // MIN_RANGE_TOKENS), MAX_SPLITS))


def decode_tune(head_size: HeadSize, programs: int, splits: int) -> DecodeTune:
    """The tune from `DECODE`; for contexts of one range, the stages that leave the fewest
    unused places in the last wave of `programs` programs.
    """
    tune, programs_held = DECODE[head_size], PROGRAMS_PER_PROCESSOR.get(head_size)
    if programs <= MAX_FEW_PROGRAMS:
        tune = tune._replace(warps=FEW_PROGRAMS_WARPS.get(head_size, tune.warps))
    if splits > 1 or programs_held is None:
        return tune

    def wave_places(stages: int) -> int:
        """Places for programs, in all waves."""
        waves = -(-programs // (PROCESSORS * programs_held[stages]))
        return waves * programs_held[stages]

    return tune._replace(stages=min(programs_held, key=wave_places))


def prefill_tune(head_size: HeadSize, target: Capability) -> PrefillTune:
    """The tune from `PREFILL`, unless the GPU has too little shared memory for it."""
    if head_size in WIDEST_HEADS and target in CAPABILITIES_WITH_99_KB:
        return WIDEST_HEADS_IN_99_KB
    small = head_size in WIDE_HEADS and target in CAPABILITIES_WITH_99_KB
    return WIDE_HEADS_IN_99_KB if small else PREFILL[head_size]

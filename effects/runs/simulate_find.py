"""The smallest size, or the greatest speed, that meets a service level."""

from bisect import bisect_left
from collections.abc import Callable
from typing import Any, Final

from attrs import evolve

from minfer.blocks.ownership import blocks_for
from minfer.effects.runs.simulate_options import Case, with_block_size, with_blocks

STEP_RATIO: Final = 1.02  # the ratio of successive values
_STEPS_EACH_WAY: Final = 350  # steps up and down: 1,000 times to a thousandth
_POWERS: Final = range(11)  # of two: sizes to try

Good = Callable[[Case], bool]


def find(setting: str, longest: int, case: Case, good: Good) -> float | None:
    """The smallest size, or the greatest speed, that is good, with the other settings of
    `case`; None if none is. `longest` is the longest request, in tokens.

    Speeds and pools by bisection, in steps of 2%: more load, or fewer blocks, is assumed
    to be never better; no more blocks are tried than the configuration has. Batch and
    block sizes have no such order: all powers of two are tried, block sizes with pools of
    equal numbers of tokens.
    """
    if setting == "speed":
        speeds = [STEP_RATIO**k for k in range(_STEPS_EACH_WAY, -_STEPS_EACH_WAY - 1, -1)]
        return _first(speeds, lambda pace: good(evolve(case, speed=pace)))
    if setting == "num-blocks":
        return _first(_pools(case, longest), lambda n: good(_of_blocks(case, n)))
    if setting == "block-size":
        tried = [1 << power for power in _POWERS[3:]]
        fits = [n for n in tried if good(_of_block_size(case, n))]
    else:
        tried = [1 << power for power in _POWERS]
        fits = [n for n in tried if good(_of_rows(case, n))]
    return min(fits, default=None)


def _first(values: list[Any], good: Callable[[Any], bool]) -> float | None:
    """The first good value, if all values after it are good."""
    index = bisect_left(values, True, key=good)
    return values[index] if index < len(values) else None


def _pools(case: Case, longest: int) -> list[int]:
    """Pools from the size of the longest request to the configured one."""
    config = case.config
    blocks = blocks_for(min(longest, config.max_model_len), config.block_size)
    min_pages = config.most_pages(blocks)
    sizes = (round(min_pages * STEP_RATIO**k) for k in range(1000))
    return sorted({n for n in sizes if n < config.num_blocks} | {config.num_blocks})


def _of_blocks(case: Case, blocks: int) -> Case:
    return evolve(case, config=with_blocks(case.config, blocks))


def _of_block_size(case: Case, size: int) -> Case:
    config = case.config
    tokens = config.num_blocks * config.block_size
    changed = with_blocks(with_block_size(config, size), tokens // size)
    return evolve(case, config=changed)


def _of_rows(case: Case, rows: int) -> Case:
    budget = max(rows, case.config.max_num_batched_tokens)
    config = evolve(case.config, max_num_seqs=rows, max_num_batched_tokens=budget)
    return evolve(case, config=config)

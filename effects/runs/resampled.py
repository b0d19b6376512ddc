"""Other loads of the same kind, one for each seed.

A distribution is drawn with another seed. A trace happened once, so its load is drawn
from it by a block bootstrap: it is cut into `BLOCKS` parts of consecutive requests, and
as many are drawn with replacement. Within a part, requests keep their order, the time
between them, their lengths and their common prefixes: bursts stay bursts. A part that is
drawn again has prefixes of its own, or its prompts would hit the cache as none did.
"""

from collections.abc import Iterable
from random import Random
from typing import Final

from attrs import evolve

from minfer.effects.runs.arrivals import ArrivalTrace, TraceRow
from minfer.effects.runs.trace_files import GENERATED, read_trace, seed_of
from minfer.values.checks import ConfigError

BLOCKS: Final = 20  # parts of a trace


def resampled(
    source: str, trace: ArrivalTrace, seed: int, max_requests: int | None, divide: int
) -> ArrivalTrace:
    """The load of a seed, of the kind of `trace`, which was read from `source`. Raises
    ConfigError for a recorded run.
    """
    if trace.config is not None:
        raise ConfigError(
            f"{source} is a recorded run, of which there is one load: --seeds needs a "
            "trace or a distribution (poisson:...)"
        )
    if source.startswith(GENERATED):
        return read_trace(f"{source},seed={seed}", max_requests, divide)
    return ArrivalTrace(_drawn_rows(trace.rows, Random(seed)))  # noqa: S311 - no secret


def first_seed(source: str, given: int | None) -> int:
    """The seed of the first load: that of the option, or of the distribution. Raises
    ConfigError.
    """
    own = seed_of(source)
    if own is None or given is None:
        return own or given or 0
    raise ConfigError(f"--first-seed {given}: {source} gives the first seed, too")


def pace_range(loads: Iterable[ArrivalTrace]) -> str:
    """By how much the pace of loads differs, in words; nothing if one has no duration."""
    spans = [(len(load.rows), load.rows[-1].time) for load in loads]
    if not all(span for _, span in spans):
        return ""
    rates = [count / span for count, span in spans]
    return f"; from {min(rates):.3g} to {max(rates):.3g} requests a second"


def how_drawn(source: str) -> str:
    """How the loads of seeds are drawn, in words."""
    if source.startswith(GENERATED):
        return "each seed draws all requests anew"
    return (
        f"each seed puts {BLOCKS} parts together, drawn with replacement from the "
        f"{BLOCKS} parts of the trace (block bootstrap)"
    )


def _drawn_rows(rows: tuple[TraceRow, ...], rng: Random) -> tuple[TraceRow, ...]:
    size = max(1, -(-len(rows) // BLOCKS))
    parts = [rows[first : first + size] for first in range(0, len(rows), size)]
    starts = [part[0].time for part in parts]
    gap = (rows[-1].time - rows[0].time) / len(rows)
    ends = [*starts[1:], rows[-1].time + gap]
    numbers = dict[tuple[int, int], int]()  # (draws of the part before, id) -> new id
    drawn_before = [0] * len(parts)
    drawn, begin = list[TraceRow](), 0.0
    for index in rng.choices(range(len(parts)), k=len(parts)):
        copy = drawn_before[index]
        drawn_before[index] += 1
        for row in parts[index]:
            ids = tuple(
                [numbers.setdefault((copy, own), len(numbers)) for own in row.ids]
            )
            time = begin + row.time - starts[index]
            drawn.append(evolve(row, time=time, ids=ids))
        begin += ends[index] - starts[index]
    return tuple(drawn)

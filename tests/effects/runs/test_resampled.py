"""The loads of seeds: of the kind of the trace, another for each, the same for all."""

from collections import Counter
from itertools import pairwise

import pytest

from minfer.effects.runs.arrivals import ArrivalTrace, TraceRow
from minfer.effects.runs.resampled import BLOCKS, resampled
from minfer.effects.runs.trace_files import read_trace
from minfer.records.config import EngineConfig
from minfer.values.checks import ConfigError

ROWS = tuple(
    TraceRow(time=0.5 * k + (k % 3) / 10, prompt=k + 1, output=9, ids=(k // 3, 1000 + k))
    for k in range(100)
)


def test_a_trace_is_cut_and_put_together() -> None:
    trace = ArrivalTrace(ROWS)
    loads = [resampled("x.csv", trace, seed, None, 1).rows for seed in range(5)]
    assert loads[0] == resampled("x.csv", trace, 0, None, 1).rows
    assert len(set(loads)) == 5
    by_prompt = {row.prompt: row for row in ROWS}
    for rows in loads:
        assert len(rows) == len(ROWS)
        assert all(a.time <= b.time for a, b in pairwise(rows))
        for first in range(0, len(rows), len(ROWS) // BLOCKS):
            part = rows[first : first + len(ROWS) // BLOCKS]
            own = [by_prompt[row.prompt] for row in part]
            assert own == list(ROWS[ROWS.index(own[0]) :][: len(part)])
            gaps = [row.time - part[0].time for row in part]
            assert gaps == pytest.approx([row.time - own[0].time for row in own])


def test_prefixes_are_shared_as_in_the_trace_but_not_between_copies() -> None:
    rows = resampled("x.csv", ArrivalTrace(ROWS), 3, None, 1).rows
    copies = Counter(row.prompt for row in rows)
    assert max(copies.values()) > 1  # some parts were drawn again
    assert len({row.ids for row in rows}) == len(rows)
    by_prompt = {row.prompt: row for row in ROWS}
    first_ids = Counter[tuple[int, int]]()
    for row in rows:
        first_ids[row.ids[0], by_prompt[row.prompt].ids[0]] += 1
    assert max(first_ids.values()) <= 3
    assert {new for new, _ in first_ids} == {row.ids[0] for row in rows}


def test_a_distribution_is_drawn_anew() -> None:
    source = "poisson:rate=3,requests=20,seed=77"
    loads = [resampled(source, read_trace(source), seed, None, 1) for seed in (0, 1)]
    assert loads[0].rows != loads[1].rows
    assert loads[1].rows == read_trace("poisson:rate=3,requests=20,seed=1").rows


def test_a_recorded_run_happened_once() -> None:
    trace = ArrivalTrace(config=EngineConfig(num_blocks=4))
    with pytest.raises(ConfigError, match="runs is a recorded run, of which there is"):
        resampled("runs", trace, 0, None, 1)

"""What a trace becomes: requests, as fast and as mixed as they are asked for."""

from pathlib import Path
from random import Random

import pytest
from attrs import evolve

from minfer.blocks.keys import block_keys
from minfer.effects.live.journal.journal_writer import JournalWriter
from minfer.effects.runs.arrivals import ArrivalTrace, TraceError, TraceRow
from minfer.effects.runs.trace_files import read_trace
from minfer.records.messages import Cancel
from minfer.records.request import Request
from minfer.simulation.simulate import Arrival, Simulated, Simulation
from tests.core.simulation.test_simulate import EVEN, config_of, requested
from tests.effects.runs.test_trace_files import azure, recorded, requests


@pytest.mark.parametrize("seed", range(6))
def test_made_up_keys_are_equal_where_prompts_are(seed: int) -> None:
    """They need not be the digests; but they tell the same blocks apart, for any block
    size.
    """
    rng = Random(seed)
    span, size = rng.choice((3, 8, 512)), rng.choice((1, 4, 5, 64))
    paths: list[tuple[int, ...]] = [()]
    fresh = iter(range(10_000))
    for _ in range(12):  # a tree: an id names all before it
        paths.append((*rng.choice(paths), next(fresh)))
    rows = []
    for path in paths[1:]:
        prompt = span * (len(path) - 1) + rng.randint(1, span)
        rows.append(TraceRow(0.0, prompt, 1, path, span))
    real: dict[bytes, bytes] = {}
    for request in requests(ArrivalTrace(tuple(rows)), size):
        assert len(request.keys) == len(request.prompt) // size
        for key, digest in zip(
            request.keys, block_keys(b"", request.prompt, size), strict=True
        ):
            assert real.setdefault(key, digest) == digest
    assert len(set(real.values())) == len(real)


def test_clients_priorities_and_deadlines_are_drawn(tmp_path: Path) -> None:
    trace = read_trace("poisson:requests=2000,prompt=1")
    mixed = [
        event for _, event in trace.arrivals(64, mix=1) if isinstance(event, Request)
    ]
    assert sum(request.client == "big" for request in mixed) == pytest.approx(
        1200, rel=0.1
    )
    assert sum(request.priority < 0 for request in mixed) == pytest.approx(200, rel=0.3)
    assert {request.deadline for request in mixed} == {1.0, 10.0}
    assert [*trace.arrivals(64, mix=1)] == [*trace.arrivals(64, mix=1)]
    assert {request.client for request in requests(read_trace(azure(tmp_path)))} == {""}


def test_other_block_sizes_have_other_keys(tmp_path: Path) -> None:
    request = requested("a", prompt=40)
    request = evolve(request, keys=block_keys(request.root, request.prompt, 4))
    trace = read_trace(str(recorded(tmp_path, config_of(), [(0.0, request)], {})))
    assert requests(trace, 4)[0].keys == request.keys
    assert requests(trace, 8)[0].keys == ()


def test_a_journal_comes_as_fast_in_blocks_of_any_size(tmp_path: Path) -> None:
    come: list[Arrival] = [
        (0.0, requested("a")),
        (4.0, requested("b")),
        (5.0, Cancel("b")),
    ]
    trace = read_trace(str(recorded(tmp_path, config_of(), come, {})))
    for size in (4, 8):
        slow, fast = (
            [time for time, _ in trace.arrivals(size, speed)] for speed in (1, 2)
        )
        assert slow[-1] > 0
        assert fast == [time / 2 for time in slow]


def test_a_journal_without_token_ids_knows_whole_blocks_only(tmp_path: Path) -> None:
    config = config_of()
    writer = JournalWriter(tmp_path, config, {}, redact=True)
    state = None
    for turn in Simulation(
        config, Simulated(), EVEN, [(0.0, requested("a", prompt=9))]
    ).turns():
        writer(turn)
        state = turn.transition.state
    assert state is not None
    writer.close(state)
    trace = read_trace(str(tmp_path))
    assert len(requests(trace, 4)[0].prompt) == 9
    assert len(requests(trace, 8)) == 1
    with pytest.raises(
        TraceError, match=r"in blocks of 6: .* blocks are known of 4 tokens"
    ):
        requests(trace, 6)

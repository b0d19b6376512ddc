"""Traces: what they say is what arrives, and what is wrong with one is said
with its row.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from minfer.effects.live.journal.journal_files import write_journal
from minfer.effects.runs.arrivals import MAX_TOKENS, ArrivalTrace, TraceError, TraceRow
from minfer.effects.runs.trace_files import read_trace
from minfer.records.config import EngineConfig
from minfer.records.messages import Cancel
from minfer.records.request import Request
from minfer.simulation.simulate import Arrival, Simulated, Simulation
from tests.core.simulation.test_simulate import EVEN, config_of, ends, requested

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.2299600,3180,8
2023-11-16 18:18:03.9799600,110,0
"""


def azure(folder: Path, text: str = AZURE) -> str:
    path = folder / "trace.csv"
    path.write_text(text, "utf-8")
    return str(path)


def mooncake(folder: Path, *rows: dict[str, Any] | str) -> str:
    path = folder / "trace.jsonl"
    path.write_text(
        "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    )
    return str(path)


def line(time: float, size: int, ids: list[int], output: int = 5) -> dict[str, Any]:
    return {
        "timestamp": time,
        "input_length": size,
        "output_length": output,
        "hash_ids": ids,
    }


def requests(trace: ArrivalTrace, block_size: int = 64) -> list[Request]:
    return [
        event for _, event in trace.arrivals(block_size) if isinstance(event, Request)
    ]


# --- what arrives -----------------------------------------------------------------------


def test_azure(tmp_path: Path) -> None:
    trace = read_trace(azure(tmp_path))
    times = [time for time, _ in trace.arrivals(64)]
    assert times == pytest.approx([0.0, 0.25, 60.0])
    assert [(len(request.prompt), request.max_tokens) for request in requests(trace)] == [
        (4808, 10),
        (3180, 8),
        (110, 1),
    ]
    assert [time for time, _ in trace.arrivals(64, speed=4.0)] == pytest.approx(
        [0, 0.0625, 15]
    )
    assert trace.sizes == [4818, 3188, 111]


def test_azure_with_a_time_zone_a_byte_order_mark_and_windows_line_ends(
    tmp_path: Path,
) -> None:
    text = "\ufeff" + AZURE.replace("00,", "00+00:00,").replace("\n", "\r\n")
    assert read_trace(azure(tmp_path, text)).sizes == [4818, 3188, 111]


def test_the_first_requests_and_shorter_ones(tmp_path: Path) -> None:
    assert len(read_trace(azure(tmp_path), max_requests=2).rows) == 2
    assert read_trace(azure(tmp_path), divide=32).sizes == [151, 100, 4]
    trace = read_trace(mooncake(tmp_path, line(0, 1200, [1, 2, 3], 64)), divide=32)
    assert trace.rows == (TraceRow(0.0, 37, 2, (1, 2, 3), 16),)
    trace = read_trace(mooncake(tmp_path, line(0, 1200, [1, 2, 3], 64)), divide=1000)
    assert trace.rows == (TraceRow(0.0, 1, 1, (1,), 1),)


def test_mooncake_prompts_begin_alike_where_their_ids_do(tmp_path: Path) -> None:
    rows = (line(0, 1100, [1, 2, 3]), line(500, 1100, [1, 2, 4]), line(500, 600, [5, 6]))
    first, second, third = requests(read_trace(mooncake(tmp_path, *rows)))
    assert first.prompt[:1024] == second.prompt[:1024]
    assert first.keys[:16] == second.keys[:16]
    assert not set(first.keys[16:]) & set(second.keys)
    assert not set(first.keys) & set(third.keys)
    assert [time for time, _ in read_trace(mooncake(tmp_path, *rows)).arrivals(64)] == [
        0,
        0.5,
        0.5,
    ]


def test_a_distribution_is_what_it_says_and_the_same_again() -> None:
    text = "poisson:rate=20,requests=4000,prompt=300,output=40,spread=0.7,seed=3"
    trace = read_trace(text)
    rows = trace.rows
    assert trace == read_trace(text) != read_trace(text.replace("seed=3", "seed=4"))
    assert len(rows) == 4000
    assert rows[-1].time == pytest.approx(200, rel=0.1)
    assert sum(row.prompt for row in rows) / 4000 == pytest.approx(300, rel=0.05)
    assert sum(row.output for row in rows) / 4000 == pytest.approx(40, rel=0.05)
    same = read_trace("poisson:requests=3,prompt=7,output=2").rows
    assert [(row.prompt, row.output) for row in same] == [(7, 2)] * 3


def test_a_share_of_prompts_has_common_prefixes() -> None:
    text = "poisson:requests=1000,prompt=100,spread=1,shared=0.3,prefix=64,prefixes=2"
    all_requests = requests(read_trace(text), 16)
    heads = [request.prompt[:64] for request in all_requests]
    alike = [head for head in heads if heads.count(head) > 1]
    assert len(alike) == pytest.approx(300, rel=0.2)
    assert len(set(alike)) == 2
    assert all(
        len(request.prompt) > 64
        for request, head in zip(all_requests, heads, strict=True)
        if head in alike
    )


def recorded(
    folder: Path, config: EngineConfig, arrivals: list[Arrival], lengths: Any
) -> Path:
    path = folder / "run.journal"
    turns = Simulation(config, Simulated(lengths), EVEN, arrivals).turns()
    write_journal(path, config, turns)
    return path


def test_a_journal_gives_what_came_and_how_long_it_became(tmp_path: Path) -> None:
    config = config_of()
    arrivals: list[Arrival] = [
        (10.0, requested("a", most=9, stop_ids=frozenset({3}))),
        (10.0, requested("b", most=5, n=2)),
        (11.5, requested("c", most=30)),
        (13.0, Cancel("c")),
        (90.0, requested("d", most=5)),
    ]
    path = recorded(tmp_path, config, arrivals, {("a", 0): 4})
    for source in (path, tmp_path):
        trace = read_trace(str(source))
        assert trace.config == config
        assert trace.lengths == {("a", 0): 4, ("b", 0): 5, ("b", 1): 5, ("d", 0): 5}
        assert [time for time, _ in trace.events] == [0.0, 0.0, 2.0, 3.0, 80.0]
        assert [event.id for _, event in trace.events] == ["a", "b", "c", "c", "d"]
    assert [
        request.id for request in requests(read_trace(str(path), max_requests=2))
    ] == [
        "a",
        "b",
    ]
    turns = [
        *Simulation(config, Simulated(trace.lengths), EVEN, trace.arrivals(4)).turns()
    ]
    repeated = {
        name: (finished.length, finished.reason) for name, finished in ends(turns).items()
    }
    assert repeated["a", 0] == (4, "stop")
    assert repeated["b", 1] == (5, "length")
    assert repeated["c", 0][1] == "cancelled"


def test_a_text_that_ended_without_a_stop_id_ends_again(tmp_path: Path) -> None:
    """A stop string's end is the text layer's word; in a simulation a token says it."""
    path = recorded(tmp_path, config_of(), [(0.0, requested("a", most=9))], {})
    trace = read_trace(str(path))
    lengths = {("a", 0): 2}
    turns = Simulation(config_of(), Simulated(lengths), EVEN, trace.arrivals(4)).turns()
    assert ends([*turns])["a", 0].length == 2


GOOD = line(0, 600, [1, 2])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("2023-11-16 18:17:05.00,10", "row 3: it has 2 columns, not 3"),
        ("", "row 3: it has 1 columns, not 3"),
        ("yesterday,10,10", "row 3: Invalid isoformat string: 'yesterday'"),
        (
            "2023-11-16 18:17:05.00,-10,10",
            "row 3: ContextTokens must be a whole number from 1 to",
        ),
        (
            "2023-11-16 18:17:05.00,0,10",
            "row 3: ContextTokens must be a whole number from 1 to",
        ),
        (
            "2023-11-16 18:17:05.00,10,-1",
            "row 3: GeneratedTokens must be a whole number from 0 to",
        ),
        (f"2023-11-16 18:17:05.00,10,{MAX_TOKENS + 1}", "row 3: GeneratedTokens must be"),
        ("2023-11-16 18:17:05.00,10," + "9" * 5000, "row 3: "),
        ("2023-11-16 18:17:05.00,ten,10", "row 3: invalid literal for int"),
        ("2023-11-16 18:17:05.00,1.5,10", "row 3: invalid literal for int"),
        ("2023-11-16 18:17:01.00,10,10", "row 3: time goes back by 2.97996 s"),
    ],
)
def test_a_bad_row_of_azure(tmp_path: Path, row: str, message: str) -> None:
    text = "\n".join([*AZURE.splitlines()[:2], row, ""])
    with pytest.raises(TraceError) as error:
        read_trace(azure(tmp_path, text))
    assert str(error.value).startswith(f"{tmp_path / 'trace.csv'}, {message}")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "Expecting property name"),
        ("[1]", "list indices must be integers"),
        ("[" * 100_000, ""),
        ("17", "'int' object is not subscriptable"),
        ({"timestamp": 0}, "it has no 'input_length'"),
        (line(0, 600, [1, 2]) | {"hash_ids": None}, "'NoneType' object is not iterable"),
        (line(0, -5, []), "input_length must be a whole number from 1 to"),
        (line(0, 10**9, []), "input_length must be a whole number from 1 to"),
        (
            line(0, 600, [1, 2]) | {"input_length": 600.0},
            "input_length must be a whole number",
        ),
        (
            line(0, 600, [1, 2]) | {"input_length": True},
            "input_length must be a whole number",
        ),
        (line(0, 600, [1, 2], -1), "output_length must be a whole number from 0 to"),
        (line(0, 600, [1]), "1 hash_ids of 512 for 600 tokens"),
        (line(0, 600, [1, -2]), "hash_ids must be whole numbers from 0"),
        (line(0, 600, [1, 2**31]), "hash_ids must be whole numbers from 0"),
        (line(-1, 600, [1, 2]), "time goes back by 0.001 s"),
        (line(float("nan"), 600, [1, 2]), "its time is nan s"),
        (line(float("inf"), 600, [1, 2]), "its time is inf s"),
        (line(1e308, 600, [1, 2]), "its time is 1e+305 s"),
        (
            line(0, 600, [1, 2]) | {"timestamp": 10**400},
            "int too large to convert to float",
        ),
        (
            line(0, 600, [1, 2]) | {"timestamp": "soon"},
            "could not convert string to float",
        ),
    ],
)
def test_a_bad_row_of_mooncake(
    tmp_path: Path, row: dict[str, Any] | str, message: str
) -> None:
    with pytest.raises(TraceError) as error:
        read_trace(mooncake(tmp_path, GOOD, row, GOOD))
    assert f"{tmp_path / 'trace.jsonl'}, row 2: {message}" in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "row 1 is of no known format; a trace is Azure's CSV"),
        (b"a,b,c\n1,2,3\n", "row 1 is of no known format; a trace is Azure's CSV"),
        (b"\x00\x01\x02", "row 1 is of no known format"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n", "there are no requests in it"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n\xff\xfe\n", "codec can't decode"),
        (b"minfer journal 1\n", "it has no head"),
        (b"minfer journal 9\n", "of a newer format"),
    ],
)
def test_a_file_that_is_no_trace(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=message) as error:
        read_trace(str(path))
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere.csv", "nowhere.csv: No such file or directory; a trace is Azure's CSV"),
        ("x" * 300, "File name too long"),
        ("poisson:speed=3", "'speed=3' is none of rate .1e-06 to 1e.06., requests"),
        ("poisson:rate=0", "'rate=0' is none of"),
        ("poisson:rate=nan", "'rate=nan' is none of"),
        ("poisson:requests=-1", "'requests=-1' is none of"),
        ("poisson:requests=1.5", "'requests=1.5' is none of"),
        ("poisson:prompt=1e99", "'prompt=1e99' is none of"),
        ("poisson:prompt", "'prompt' is none of"),
        ("poisson:spread=1000", "'spread=1000' is none of"),
    ],
)
def test_what_is_not_there_or_cannot_be(source: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(source)


def test_a_trace_cannot_be_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    with pytest.raises(TraceError, match=f"{pipe}: a pipe cannot be read twice"):
        read_trace(str(pipe))


def test_a_folder_without_journals_and_prompts_that_cannot_be_divided(
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match=r"there is no .journal file in this folder"):
        read_trace(str(tmp_path))
    path = recorded(tmp_path, config_of(), [(0.0, requested("a"))], {})
    with pytest.raises(TraceError, match="prompts of a journal cannot be divided"):
        read_trace(str(path), divide=2)
    empty = tmp_path / "empty.journal"
    write_journal(empty, config_of(), ())
    with pytest.raises(TraceError, match="no request came while it was written"):
        read_trace(str(empty))

"""Lines are written whole and in order, by a thread, and are bounded."""

import os
import time
from collections.abc import Iterator
from functools import partial

import pytest

from minfer.effects.serving.observability import stdout_lines as writing
from minfer.effects.serving.observability.stdout_lines import LineWriter


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Both ends."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def line(number: int) -> str:
    return f"{number} " + "x" * 100


def test_lines_come_in_order_and_whole(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    lines = LineWriter(writer)
    for number in range(200):
        lines.put(partial(line, number))
    lines.close()
    lines_read = b"".join(os.read(reader, 4096) for _ in range(6)).decode().splitlines()
    assert lines_read == [line(number) for number in range(200)]


def test_processes_that_share_a_pipe_do_not_mix_lines(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, writer = pipe
    writes: list[bytes] = []
    real = os.write

    def write(file: int, data: bytes) -> int:
        writes.append(data)
        return real(file, data)

    monkeypatch.setattr(os, "write", write)
    lines = LineWriter(writer)
    for number in range(200):
        lines.put(partial(line, number))
    lines.close()
    assert len(writes) == 6
    assert all(len(written) <= 4096 and written.endswith(b"\n") for written in writes)


@pytest.mark.long
def test_before_it_is_time_nothing_is_written(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    os.set_blocking(reader, False)
    times = [False]
    lines = LineWriter(writer, lambda: times[0])
    lines.put(lambda: "early")
    time.sleep(3 * writing.GATHER_SECONDS)
    with pytest.raises(BlockingIOError):
        os.read(reader, 10)
    times[0] = True
    os.set_blocking(reader, True)
    assert os.read(reader, 10) == b"early\n"
    lines.close()


def test_unread_lines_are_dropped_and_counted(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = pipe
    monkeypatch.setattr(writing, "MAX_WAITING_LINES", 3)
    times = [False]
    lines = LineWriter(writer, lambda: times[0])
    for number in range(5):
        lines.put(partial(str, number))
    times[0] = True
    lines.close()
    assert os.read(reader, 99) == b"0\n1\n2\nminfer: 2 lines were dropped\n"


def test_a_closed_pipe_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    lines = LineWriter(writer)
    lines.put(lambda: "it is not read")
    lines.close()
    lines.put(lambda: "nor this")
    os.close(writer)

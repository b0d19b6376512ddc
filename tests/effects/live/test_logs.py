"""What is logged says which process it is from."""

import logging
import subprocess
import sys

import pytest

from minfer.effects.live.logs import (
    BURST_SECONDS,
    MAX_BURST_LINES,
    MAX_LINE_KINDS,
    LogRateLimit,
)

CODE = """
import logging
from minfer.effects.live.logs import configure_logs
configure_logs("api 1")
logging.getLogger("minfer.link").warning("it is %s", "cut")
logging.getLogger("uvicorn.error").info("of no concern")
logging.getLogger("minfer.start").info("loading")
"""


@pytest.mark.long
def test_warnings_and_the_start_name_their_process() -> None:
    completed = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=True
    )
    warning, start = completed.stderr.splitlines()
    assert warning.endswith(" minfer api 1 WARNING minfer.link: it is cut")
    assert start.endswith(" minfer api 1 INFO minfer.start: loading")
    assert not completed.stdout


def line(text: str, *values: object, level: int = logging.WARNING) -> logging.LogRecord:
    return logging.LogRecord("uvicorn.error", level, "", 0, text, values, None)


def test_lines_that_say_the_same_are_thinned_and_counted() -> None:
    now = [100.0]
    thinned = LogRateLimit(lambda: now[0])
    written = [thinned.filter(line("port %s", i)) for i in range(MAX_BURST_LINES + 7)]
    assert written == [True] * MAX_BURST_LINES + [False] * 7
    assert thinned.filter(line("another"))
    assert thinned.filter(line("port %s", 1, level=logging.ERROR))
    now[0] += BURST_SECONDS
    next_one = line("port %s", 9)
    assert thinned.filter(next_one)
    assert next_one.getMessage() == "port 9 (7 more like it before)"
    last = line("port %s", 10)
    assert thinned.filter(last)
    assert last.getMessage() == "port 10"


def test_lines_for_debugging_are_all_written() -> None:
    """Who has asked for them wants each."""
    thinned = LogRateLimit(lambda: 0.0)
    lines = [line("step %s", i, level=logging.DEBUG) for i in range(3 * MAX_BURST_LINES)]
    assert all(thinned.filter(each) for each in lines)


def test_kinds_of_lines_do_not_grow_without_end() -> None:
    thinned = LogRateLimit(lambda: 0.0)
    for number in range(3 * MAX_LINE_KINDS):
        assert thinned.filter(line(f"made of {number}"))
    assert len(thinned._counts) <= MAX_LINE_KINDS

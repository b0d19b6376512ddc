"""Signals while a server starts: it ends in order, with the exit code of its README."""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from minfer.effects.cli import main as cli
from minfer.values.checks import ConfigError
from tests.circles import claimed, long
from tests.effects.serving.process_deaths import processes

SOON = 60.0  # seconds
DELAYS = (0.0, 0.05, 0.2, 0.5, 1.0, 2.0)  # seconds
SERVE = ("serve", "--port=0", "--dry-run", "--preparers=1")
COMMANDS = {
    "two API servers": (*SERVE, "--api-processes=2"),
    "two engines": (*SERVE, "--api-processes=1", "--replicas=2"),
    "one process": (*SERVE, "--api-processes=0"),
    "router": ("route", "--port=0", "--backend=http://127.0.0.1:9"),
}
CASES = [
    *long([("two API servers", signal.SIGTERM, 0.05), ("router", signal.SIGTERM, 0.5)]),
    *claimed(
        (command, number, delay)
        for command in COMMANDS
        for number in (signal.SIGTERM, signal.SIGINT)
        for delay in DELAYS
    ),
]


@contextlib.contextmanager
def started(
    *arguments: str, wait: bool = True
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A command, which handles SIGTERM if that is waited for; and what the environments
    of all its processes have.
    """
    mark = f"MINFER_TEST={secrets.token_hex(8)}"
    with subprocess.Popen(
        [sys.executable, "-m", "minfer", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "MINFER_TEST": mark.partition("=")[2]},
    ) as process:
        try:
            end = time.monotonic() + SOON
            while wait and not handles_sigterm(process.pid):
                assert time.monotonic() < end
                time.sleep(0.001)
            yield process, mark
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def handles_sigterm(number: int) -> bool:
    status = Path(f"/proc/{number}/status").read_text()
    (caught,) = (
        line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")
    )
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def marked(mark: str) -> list[int]:
    """The processes with this in their environment that have not ended."""
    numbers = []
    for number in processes():
        with contextlib.suppress(OSError):
            if mark.encode() in Path(f"/proc/{number}/environ").read_bytes():
                numbers.append(number)
    return numbers


@pytest.mark.parametrize("command", ["serve", "route", "generate"])
def test_servers_handle_sigterm_before_anything_is_imported(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = []

    def stop() -> None:
        handlers.append(signal.getsignal(signal.SIGTERM))
        raise ConfigError("this is enough")

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sys, "argv", ["minfer", command])
    monkeypatch.setattr(cli, "parser", stop)
    try:
        assert cli.main() == 2
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (handlers != [before]) is (command != "generate")


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_at_the_first_line_ends_a_server(number: signal.Signals) -> None:
    with started(*COMMANDS["one process"], wait=False) as (process, _):
        assert process.stderr is not None
        assert process.stderr.readline().startswith("minfer ")
        process.send_signal(number)
        _, err = process.communicate(timeout=SOON)
    assert process.returncode == (0 if number == signal.SIGTERM else 130)
    assert "Traceback" not in err


@pytest.mark.parametrize("to_all", [False, *claimed([True])], ids=["one", "all"])
@pytest.mark.parametrize(("command", "number", "delay"), CASES)
def test_a_signal_while_a_server_starts_ends_it(
    command: str, number: signal.Signals, delay: float, to_all: bool
) -> None:
    with started(*COMMANDS[command]) as (process, mark):
        time.sleep(delay)
        (os.killpg if to_all else os.kill)(process.pid, number)
        _, err = process.communicate(timeout=SOON)
        assert process.returncode == (0 if number == signal.SIGTERM else 130), err
        assert "Traceback" not in err
        end = time.monotonic() + SOON
        while left := marked(mark):
            assert time.monotonic() < end, [processes().get(number) for number in left]
            time.sleep(0.01)

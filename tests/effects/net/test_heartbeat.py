"""When a process counts as hung: a matter of what was seen, and of nothing else."""

import os
import signal
import subprocess
import tempfile

import pytest

from minfer.effects.net.heartbeat import (
    HEARTBEAT_BYTES,
    LOADING_FACTOR,
    STOPPED_SECONDS,
    Heartbeat,
    Watch,
)

LIMIT = 10.0
POLL_SECONDS = 0.5


def watched(watch: Watch, start: float, seconds: float, *, ready: bool = True) -> float:
    """Poll for some seconds; returns when it was taken for hung, or infinity."""
    for number in range(1, int(seconds / POLL_SECONDS) + 1):
        if watch.hangs(start + number * POLL_SECONDS, ready=ready):
            return number * POLL_SECONDS
    return float("inf")


def begun(
    limit: float = LIMIT, heartbeat: Heartbeat | None = None, process: int = 0
) -> Watch:
    watch = Watch(heartbeat or Heartbeat(), limit, process)
    assert not watch.hangs(100.0, ready=False)
    return watch


def test_a_process_silent_for_the_limit_hangs_once() -> None:
    watch = begun()
    assert watched(watch, 100.0, 3 * LIMIT) == LIMIT
    assert watched(watch, 100.0 + LIMIT, 3 * LIMIT) == float("inf"), "it may take a while"


def test_a_process_with_a_heartbeat_does_not_hang() -> None:
    heartbeat = Heartbeat()
    watch = begun(heartbeat=heartbeat)
    for number in range(300):  # counts run through, and are not what matters
        heartbeat.beat()
        assert watched(watch, 100.0 + 9 * number, 9.0) > LIMIT
    heartbeat.beat()
    assert watched(watch, 2800.0, 3 * LIMIT) == POLL_SECONDS + LIMIT


def test_a_loading_process_has_more_time() -> None:
    silent = watched(begun(), 100.0, 2 * LOADING_FACTOR * LIMIT, ready=False)
    assert silent == LOADING_FACTOR * LIMIT


def test_time_without_checks_does_not_count() -> None:
    watch = begun()
    assert not watch.hangs(101.0, ready=True)
    assert not watch.hangs(99_999.0, ready=True), "all were stopped, and go on"
    assert watched(watch, 99_999.0, 3 * LIMIT) > LIMIT / 2


def test_a_stopped_process_hangs_sooner() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        running = watched(begun(60.0, process=process.pid), 100.0, 50.0)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        stopped = watched(begun(60.0, process=process.pid), 100.0, 50.0)
        process.kill()
    assert running == float("inf"), "it may be in a long step"
    assert stopped == STOPPED_SECONDS


def test_a_heartbeat_is_shared_through_a_file() -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(HEARTBEAT_BYTES)
        sender, receiver = Heartbeat(file.fileno()), Heartbeat(file.fileno())
    sender.beat()
    assert receiver.count == 1


@pytest.mark.parametrize("ready", [True, False])
def test_without_a_limit_no_process_hangs(ready: bool) -> None:
    assert watched(begun(0.0), 100.0, 10_000.0, ready=ready) == float("inf")

"""The process above the others, with children that load nothing, run as a process."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import define, field

from minfer.effects.cli.main import main
from tests.effects.waiting import alive, until

SCRIPT = [sys.executable, "-m", "tests.effects.serving.supervised"]
PATIENCE = 10.0  # seconds for what takes some hundredths


@define(eq=False)
class Server:
    """A supervisor, and what its processes did."""

    process: subprocess.Popen[str]
    lines: "queue.Queue[str]" = field(factory=queue.Queue)
    seen: list[tuple[str, str]] = field(factory=list)  # names and words
    ids: dict[str, int] = field(factory=dict)

    def read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)

    def until(self, name: str, word: str) -> None:
        """Wait for a word of a process."""
        while not self.seen or self.seen[-1] != (name, word):
            sender, number, message = self.lines.get(timeout=PATIENCE).split()
            self.seen.append((sender, message))
            self.ids[sender] = int(number)

    def ended(self) -> tuple[int, str]:
        """Wait for its end: exit code, and standard error."""
        code = self.process.wait(PATIENCE)
        while True:
            with contextlib.suppress(queue.Empty):
                sender, _, message = self.lines.get(timeout=0.1).split()
                self.seen.append((sender, message))
                continue
            break
        assert self.process.stderr is not None
        assert not any(map(there, self.ids.values())), "a child is left"
        return code, self.process.stderr.read()

    def kill(self, name: str) -> None:
        os.kill(self.ids[name], signal.SIGKILL)


def there(number: int) -> bool:
    return Path(f"/proc/{number}").exists()


@contextlib.contextmanager
def started(*options: str) -> Iterator[Server]:
    with subprocess.Popen(
        [*SCRIPT, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        server = Server(process)
        reader = threading.Thread(target=server.read)
        reader.start()
        try:
            yield server
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            reader.join()


@contextlib.contextmanager
def serving(*options: str) -> Iterator[Server]:
    with started(*options) as server:
        server.until("server", "ready")
        yield server


@pytest.mark.long
def test_a_killed_process_is_restarted_and_ready_is_reported_once() -> None:
    with serving() as server:
        for name in ("engine", "api-0", "engine"):
            before = server.ids[name]
            server.kill(name)
            server.until(name, "started")
            assert server.ids[name] != before
            assert not there(before), "a zombie is left"
        server.process.send_signal(signal.SIGTERM)
        code, err = server.ended()
        assert server.seen.count(("server", "ready")) == 1
    assert code == 0
    assert err.splitlines() == [
        f"minfer: {name} ended by signal 9; it is started again"
        for name in ("engine", "api 0", "engine")
    ]


@pytest.mark.long
def test_fronts_drain_and_then_the_engine_is_stopped() -> None:
    with serving("--work=0.2") as server:
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() == (0, "")
        last = server.seen[-3:]
    assert sorted(last[:2]) == [("api-0", "drained"), ("api-1", "drained")]
    assert last[2] == ("engine", "stopped")


@pytest.mark.long
@pytest.mark.parametrize("name", ["engine", "api 1"])
def test_an_engine_that_dies_while_fronts_drain_is_started_again(name: str) -> None:
    with serving("--endless=api 0") as server:
        server.process.send_signal(signal.SIGTERM)
        server.until("api-1", "drained")
        if name == "engine":
            server.kill("engine")
            server.until("engine", "started")
        server.process.send_signal(signal.SIGTERM)
        code, _ = server.ended()
        assert server.seen[-2:] == [("api-0", "stopped"), ("engine", "stopped")]
        assert server.seen.count(("api-1", "started")) == 1  # not to serve again
    assert code == 0


@pytest.mark.long
def test_a_signal_to_all_processes_is_heard_once() -> None:
    with serving("--work=0.2") as server:
        os.killpg(server.process.pid, signal.SIGTERM)
        assert server.ended() == (0, "")
        assert {("api-0", "drained"), ("api-1", "drained")} <= set(server.seen)


@pytest.mark.long
def test_an_interrupt_stops_at_once_and_has_its_code() -> None:
    with serving("--work=500") as server:
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.ended() == (130, "")
        assert {("api-0", "stopped"), ("api-1", "stopped")} <= set(server.seen)


@pytest.mark.long
@pytest.mark.parametrize("deaf", ["engine", "api 0"])
def test_a_process_that_ignores_signals_is_killed_after_its_time(deaf: str) -> None:
    with serving(f"--deaf={deaf}", "--patience=0.2", "--last-moments=0.2") as server:
        started = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        code, _ = server.ended()
        assert time.monotonic() - started >= 0.4
    assert code == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("hanging", "ending"), [("engine", False), ("engine", True), ("api 0", False)]
)
def test_a_process_that_hangs_is_killed_and_started_again(
    hanging: str, ending: bool
) -> None:
    name = hanging.replace(" ", "-")
    with serving("--limit=0.5", *["--endless=api 0"][:ending]) as server:
        if ending:
            server.process.send_signal(signal.SIGTERM)
            server.until("api-1", "drained")
        before = server.ids[name]
        os.kill(before, signal.SIGSTOP)
        started = time.monotonic()
        server.until(name, "started")
        assert time.monotonic() - started > 0.3
        assert server.ids[name] != before
        assert not there(before)
        server.process.send_signal(signal.SIGTERM)
        code, err = server.ended()
        assert server.seen.count(("api-1", "started")) == 1, "it was well"
    assert code == 0
    silent = "has not answered for too long (--engine-timeout)"
    assert err.splitlines() == [
        f"minfer: {hanging} {silent}; it is killed",
        f"minfer: {hanging} ended by signal 9; it is started again",
    ]


@pytest.mark.long
def test_a_front_that_hangs_while_fronts_drain_is_killed() -> None:
    with serving("--limit=0.5", "--endless=api 0") as server:
        server.process.send_signal(signal.SIGTERM)
        server.until("api-1", "drained")
        os.kill(server.ids["api-0"], signal.SIGSTOP)
        code, _ = server.ended()
        assert server.seen.count(("api-0", "started")) == 1, "nothing new is begun"
        assert server.seen[-1] == ("engine", "stopped")
    assert code == 0


@pytest.mark.long
@pytest.mark.parametrize("name", ["engine", "api-0"])
def test_a_process_may_be_slow_to_answer_within_its_limit(name: str) -> None:
    with serving("--limit=60") as server:
        os.kill(server.ids[name], signal.SIGSTOP)
        time.sleep(0.3)  # some looks
        os.kill(server.ids[name], signal.SIGCONT)
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() == (0, "")


@pytest.mark.claimed  # test_heartbeat asks it of a clock that jumps
def test_a_server_that_was_stopped_as_a_whole_goes_on() -> None:
    with serving("--limit=4") as server:
        numbers = (server.process.pid, *server.ids.values())
        # Stopped for more than `STOPPED_SECONDS`, and more than the limit.
        for signal_number, pause in ((signal.SIGSTOP, 12.0), (signal.SIGCONT, 2.0)):
            for number in numbers:
                os.kill(number, signal_number)
            time.sleep(pause)
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() == (0, "")


@pytest.mark.long
@pytest.mark.parametrize("stopped", ["", "engine"])
def test_children_end_when_their_parent_is_killed(stopped: str) -> None:
    with serving() as server:
        if stopped:  # it cannot look whether its parent is there
            os.kill(server.ids[stopped], signal.SIGSTOP)
        server.process.kill()
        until(lambda: not any(map(alive, server.ids.values())))


@pytest.mark.long
def test_what_cannot_begin_ends_with_its_code() -> None:
    with started("--failing=engine") as server:
        code, err = server.ended()
        assert ("server", "ready") not in server.seen
    assert (code, err) == (7, "")


@pytest.mark.long
def test_all_end_if_a_front_cannot_begin_even_if_one_ignores_signals() -> None:
    with started("--failing=api 1", "--deaf=engine", "--last-moments=0.1") as server:
        code, _ = server.ended()
    assert code == 7


@pytest.mark.long
def test_adopted_orphans_are_ignored() -> None:
    with serving("--orphaning=engine") as server:
        server.kill("engine")
        server.until("engine", "started")
        time.sleep(0.5)  # the first orphan ends
        server.process.send_signal(signal.SIGTERM)
        code, err = server.ended()
    assert (code, err.count("\n")) == (0, 1)


def test_a_folder_whose_name_is_too_long_for_a_socket_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    assert main(["serve", "--port=0", "--api-processes=1"]) == 2
    _, err = capsys.readouterr().err.splitlines()
    assert err.startswith(f"minfer: {folder}")
    assert err.endswith("too long a path for a socket; shorten TMPDIR")


@pytest.mark.parametrize("limit", ["-1", "nan"])
def test_a_timeout_that_cannot_be(limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--port=0", "--api-processes=1", f"--engine-timeout={limit}"]
    with pytest.raises(SystemExit):
        main(["serve", *options])
    error = capsys.readouterr().err
    assert f"argument --engine-timeout: '{limit}' is not a number of seconds" in error


def test_a_number_of_fronts_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port=0", "--api-processes=-1"]) == 2
    assert "--api-processes must be at least 0, not -1" in capsys.readouterr().err

"""The engine's process: it says how far it is, ends when its parent says so, and when it
breaks it ends, too.
"""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import define

from minfer.effects.cluster.engine_server import engine_process
from minfer.effects.cluster.engine_server.engine_process import BROKEN
from minfer.effects.cluster.link import link_messages as wire
from minfer.effects.execution.contract import workers_of
from minfer.effects.execution.ranks.micro_batches import MicroBatchExecutor
from minfer.effects.execution.ranks.worker_group import WorkerGroup
from minfer.effects.live.journal.journal_files import read_journal
from minfer.effects.net.child import STOP
from minfer.records.request import Request
from tests.effects.cluster.plain import Plain, plain

RUN = """
import sys, time
from pathlib import Path
from minfer.effects.cluster.engine_server import engine_process
from minfer.effects.live import served_model as served
from minfer.effects.setup.engine_args import EngineArgs

class Slow(served.ServedModel):
    def _open(self, *how):
        print("loads", flush=True)
        time.sleep({slow})
        super()._open(*how)
        if {broken}:
            self.worker.driver.executor.launch = lambda plan: 1 / 0

engine_process.ServedModel = Slow
args = EngineArgs(
    executor="dry", num_gpu_blocks_override={blocks}, journal={journal!r}
)
code = engine_process.run_engine(
    args, Path({path!r}), 1, lambda: print("ready", flush=True)
)
sys.exit(code)
"""
HELLO = wire.ApiServerHello(0, 1, 0, ())
REQUESTED = Request(id="a", prompt=(1, 2, 3), max_tokens=40)


@define(eq=False)
class Engine:
    """An engine's process."""

    process: subprocess.Popen[str]
    path: Path

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ended(self) -> tuple[int, str]:
        assert self.process.stderr is not None
        return self.process.wait(20), self.process.stderr.read()


@contextlib.contextmanager
def engine(
    folder: Path,
    *,
    slow: float = 0,
    broken: bool = False,
    journal: str | None = None,
    blocks: int = 64,
) -> Iterator[Engine]:
    path = folder / "engine"
    path.unlink(missing_ok=True)
    code = RUN.format(
        slow=slow, broken=broken, journal=journal, path=str(path), blocks=blocks
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        started = Engine(process, path)
        try:
            assert started.line() == "loads"
            yield started
        finally:
            process.kill()


def until(api_server: Plain, true: Callable[[wire.ToApiServer], bool]) -> None:
    api_server.socket.settimeout(10)
    while not any(map(true, api_server.hear())):
        pass


@pytest.mark.long
def test_it_listens_before_it_has_loaded_and_says_so(tmp_path: Path) -> None:
    with engine(tmp_path, slow=0.3) as running, plain(running.path, HELLO) as api_server:
        until(
            api_server,
            lambda message: message == wire.LoadingProgress("loading the model"),
        )
        until(
            api_server,
            lambda message: (
                isinstance(message, wire.EngineReady) and message.num_blocks == 64
            ),
        )
        assert running.line() == "ready"
        api_server.say(wire.SubmitRequests((REQUESTED,)))
        until(
            api_server,
            lambda message: (
                isinstance(message, wire.ApiServerOutputs) and bool(message.finished)
            ),
        )
        running.process.send_signal(STOP)
        assert api_server.is_cut()
        assert running.ended() == (0, "")


@pytest.mark.long
def test_what_is_sent_to_all_processes_does_not_end_it(tmp_path: Path) -> None:
    with engine(tmp_path) as running:
        assert running.line() == "ready"
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            running.process.send_signal(signal_number)
        with plain(running.path, HELLO, wire.SubmitRequests((REQUESTED,))) as api_server:
            until(
                api_server,
                lambda message: (
                    isinstance(message, wire.ApiServerOutputs) and bool(message.finished)
                ),
            )
        running.process.send_signal(STOP)
        assert running.ended() == (0, "")


@pytest.mark.long
def test_an_unwanted_model_is_not_waited_for(tmp_path: Path) -> None:
    with engine(tmp_path, slow=600) as running:
        running.process.send_signal(STOP)
        assert running.ended() == (0, "")


@pytest.mark.long
def test_an_engine_that_breaks_ends_and_says_why(tmp_path: Path) -> None:
    with engine(tmp_path, broken=True) as running:
        assert running.line() == "ready"
        with plain(running.path, HELLO, wire.SubmitRequests((REQUESTED,))) as api_server:
            messages = api_server.rest()
        # It is not announced as an end for which no request is blamed.
        assert wire.LoadingProgress("ending") not in messages
        code, err = running.ended()
    assert code == BROKEN
    assert "the engine broke: ZeroDivisionError" in err
    assert err.count("Traceback") == 1


@pytest.mark.long
def test_engines_after_it_go_on_in_the_same_folder_of_journals(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    contents: dict[Path, bytes] = {}
    for number in range(3):
        with engine(tmp_path, journal=str(folder)) as running:
            assert running.line() == "ready"
            with plain(
                running.path, HELLO, wire.SubmitRequests((REQUESTED,))
            ) as api_server:
                until(
                    api_server,
                    lambda message: (
                        isinstance(message, wire.ApiServerOutputs)
                        and bool(message.tokens)
                    ),
                )
                running.process.kill()
                running.process.wait(10)
        files = sorted(folder.iterdir())
        assert len(files) == number + 1
        for path, before in contents.items():
            assert path.read_bytes() == before, "what was recorded is still there"
        contents = {path: path.read_bytes() for path in files}
    for path in contents:
        assert sum(1 for _ in read_journal(path).turns()) > 1


@pytest.mark.long
def test_engines_after_it_have_as_many_blocks(tmp_path: Path) -> None:
    for blocks in (64, 32):  # there is less memory by then
        with engine(tmp_path, blocks=blocks) as running:
            assert running.line() == "ready"
            with plain(running.path, HELLO) as api_server:
                until(
                    api_server,
                    lambda message: (
                        isinstance(message, wire.EngineReady) and message.num_blocks == 64
                    ),
                )


@pytest.mark.parametrize("stages", [1, 2])
def test_an_engine_ends_though_its_device_waits_for_a_lost_rank(
    stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes, over = SimpleQueue[int](), Event()
    monkeypatch.setattr(engine_process, "RANK_LOSS_SECONDS", 0.05)
    monkeypatch.setattr("os._exit", codes.put)

    def release() -> None:  # what releases the device waits, too
        over.wait(60)

    workers = WorkerGroup(2, {})
    workers.on_loss.append(release)
    executor: Any = SimpleNamespace(workers=workers)
    if stages > 1:
        executor = MicroBatchExecutor(executor, stages, vocab=8)
    engine_process._end_with_ranks(executor)
    Thread(
        target=workers._handle_loss, args=[workers.workers[0], "a test"], daemon=True
    ).start()
    assert codes.get(timeout=10) == BROKEN
    over.set()


def test_an_engine_of_one_rank_has_no_crew() -> None:
    executor: Any = SimpleNamespace()
    engine_process._end_with_ranks(executor)
    assert workers_of(executor) is None
    executor.workers = None  # it could be one of several
    engine_process._end_with_ranks(executor)
    assert workers_of(executor) is None

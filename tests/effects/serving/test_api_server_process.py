"""An API server's process: it hears its parent alone, and ends when it cannot serve."""

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minfer.effects.net.child import DRAIN, STOP
from minfer.effects.serving.processes import api_server_process
from minfer.effects.serving.processes.gate import Gate
from tests.circles import claimed

# An engine that was set up as it says, and an API server, in one process.
RUN = """
import asyncio, sys, time
from pathlib import Path
from minfer.effects.cli.exit_codes import guarded
from minfer.effects.cluster.link import link_messages as wire
from minfer.effects.cluster.engine_server.engine_server import EngineServer
from minfer.effects.cluster.engine_server.link_server import LinkServer
from minfer.effects.cluster.link.link_terms import own_terms
from minfer.effects.net.addresses import listen_at as listen_on
from minfer.effects.serving.processes import api_server_process
from minfer.effects.serving.processes.server import HttpOptions, listen_at
from minfer.effects.setup.prepare import prepare
from minfer.effects.setup.engine_args import EngineArgs
from tests.effects.cluster.ends import MadeUp

args = EngineArgs(executor="dry", num_gpu_blocks_override=64)
(listener,) = listen_at("127.0.0.1", 0)
host = EngineServer(1)
path = Path({path!r})
server = LinkServer(host)
server.start()
server.accept_links(listen_on(path), own_terms())
fingerprint = prepare(args).fingerprint

def open(fingerprint):
    host.open(MadeUp(), wire.EngineReady("cpu", 64, fingerprint))

heartbeats = []

def beat():
    heartbeats.append(time.monotonic())

def ready():
    print("ready", flush=True)
    {when_ready}

{before}
open({first})
plan = api_server_process.ApiServerPlan(
    number=0, listener=listener, paths=[path], args=args, http=HttpOptions(names=["x"])
)
print("begins", flush=True)
sys.exit(guarded(lambda: api_server_process.run_api_server(plan, beat, ready)))
"""


def api_server(
    folder: Path, first: str = "fingerprint", when_ready: str = "pass", before: str = ""
) -> "subprocess.Popen[str]":
    path = str(folder / "engine")
    code = RUN.format(path=path, first=first, when_ready=when_ready, before=before)
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


DIFFERENT = "minfer: API server and engine have read different models: were files changed"


@pytest.mark.long
def test_an_engine_of_another_model_is_not_served(tmp_path: Path) -> None:
    with api_server(tmp_path, first="b'another'") as process:
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (2, "begins\n")
    assert err.startswith(DIFFERENT)


@pytest.mark.long
def test_a_later_engine_of_another_model_is_not_served(tmp_path: Path) -> None:
    with api_server(tmp_path, when_ready="open(b'another')") as process:
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (2, "begins\nready\n")
    assert err.startswith(DIFFERENT)


@pytest.mark.long
def test_a_front_that_cannot_be_linked_ends(tmp_path: Path) -> None:
    broken = (
        "api_server_process.keep_linked = "
        "lambda *_: asyncio.wait_for(asyncio.sleep(9), 0)"
    )
    with api_server(tmp_path, before=broken) as process:
        _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "TimeoutError" in err


@pytest.mark.long
def test_a_blocked_event_loop_sends_no_heartbeats(tmp_path: Path) -> None:
    block = (
        "time.sleep(1); print(len(heartbeats) > 0, heartbeats[-1] < time.monotonic() - 1)"
    )
    go_on = (
        "asyncio.get_running_loop().call_later(1, lambda: print(heartbeats[-1] > end))"
    )
    when_ready = f"{block}; end = time.monotonic(); {go_on}"
    with api_server(tmp_path, when_ready=when_ready) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(4)]
        process.send_signal(STOP)
    assert lines == ["begins\n", "ready\n", "True True\n", "True\n"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("signal_number", "wait"),
    [(DRAIN, True), (STOP, False), *claimed([(DRAIN, False), (STOP, True)])],
)
def test_its_parent_ends_it_however_early(
    tmp_path: Path, signal_number: signal.Signals, *, wait: bool
) -> None:
    with api_server(tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        if wait:
            assert process.stdout.readline() == "ready\n"
            for shared_signal in (signal.SIGTERM, signal.SIGINT):  # sent to all processes
                process.send_signal(shared_signal)
            time.sleep(0.3)
            assert process.poll() is None
        process.send_signal(signal_number)
        code = process.wait(10)
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert code in ((0,) if wait else (0, -signal_number))


@pytest.mark.parametrize("replaces", [False, True])
def test_a_front_in_place_of_another_accepts_once_it_can_answer(
    *, replaces: bool
) -> None:
    accepted_after = list[bool]()  # whether it could answer then

    async def serve(**_: Any) -> None:
        accepted_after.append(gate.application is not None)

    async def run() -> None:
        accepting = asyncio.create_task(api_server_process._accept(server, plan, gate))
        await asyncio.sleep(0.1)
        assert accepting.done() is not replaces
        gate.application = object()  # type: ignore[assignment]  # it can answer
        await accepting

    server: Any = SimpleNamespace(should_exit=False, serve=serve)
    plan: Any = SimpleNamespace(announced=lambda: replaces, listener=None)
    gate = Gate(lambda: "")
    asyncio.run(run())
    assert accepted_after == [replaces]

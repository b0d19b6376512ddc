"""`minfer serve` as a process: how it starts, what stops it, and what it refuses to start
with.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosedError
from websockets.sync.client import ClientConnection, connect

import minfer
from minfer.effects.cli.main import main
from minfer.effects.serving.processes import server
from minfer.effects.serving.processes.server import (
    HttpOptions,
    HttpServer,
    http_config,
    listen_at,
)
from minfer.values.checks import ConfigError
from tests.effects.served import Serving, events
from tests.effects.test_imports import loaded_by

SERVE = [sys.executable, "-m", "minfer", "serve", "--port", "0"]


SLACK = 4


@contextlib.contextmanager
def process(
    *options: str, **environment: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server that is ready, and its address."""
    env = {**os.environ, **environment}
    with subprocess.Popen(
        [*SERVE, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    ) as running:
        assert running.stdout is not None
        try:
            ready = running.stdout.readline()
            assert ready.startswith("minfer: "), ready
            page = running.stdout.readline()
            assert page.startswith("minfer: a page to try it is at http"), page
            cache = running.stdout.readline()
            assert cache.startswith("minfer: the prefix cache is "), cache
            yield running, ready.split()[-1].removesuffix("/v1")
        finally:
            running.kill()


def unexpected(err: str) -> str:
    """Standard error without the lines about a server's start, and about its load, which
    come after ten seconds.
    """
    first, *lines = err.splitlines(keepends=True)
    assert first.startswith(f"minfer {minfer.__version__}: loading ")
    expected = re.compile(" INFO minfer.(start|load): ")
    return "".join(line for line in lines if not expected.search(line))


def sent(link: ClientConnection, text: str) -> list[str | bytes]:
    """What comes back on a socket until it is closed."""
    link.send(text)
    return list(link)


@pytest.mark.long
def test_a_dry_run_is_healthy() -> None:
    with process("--dry-run") as (running, url):
        assert httpx.get(f"{url}/healthz").status_code == 200
        response = httpx.post(
            f"{url}/v1/chat/completions",
            timeout=30,
            json={"messages": [{"role": "user", "content": "x"}], "temperature": 0},
        )
        assert (
            "not written by a model"
            in response.json()["choices"][0]["message"]["content"]
        )
        with connect(f"{url.replace('http', 'ws')}/v1/stream") as link:
            body = {"prompt": "x", "max_tokens": 1}
            link.send(json.dumps({"id": "a", "endpoint": "completions", "body": body}))
            assert "choices" in json.loads(link.recv())["event"]
            with pytest.raises(ConnectionClosedError, match=r"1009|no close frame"):
                # More than any body may have; what is not read may cost the close frame.
                sent(link, "x" * 5_000_000)
        running.send_signal(signal.SIGTERM)
        out, err = running.communicate(timeout=30)
        assert (running.returncode, out, unexpected(err)) == (0, "", "")


@pytest.mark.long
def test_a_dry_run_loads_no_torch() -> None:
    code = """
from minfer.effects.serving.application import Application
from minfer.effects.live.async_llm import AsyncLLM
llm = AsyncLLM(executor="dry")
Application(llm, ["x"])
llm.close()
"""
    assert not {"torch", "transformers", "safetensors"} & loaded_by(code)


DRAINING = "minfer: 1 request may take 0.2 s to end; another signal stops them\n"


@pytest.mark.long
@pytest.mark.parametrize(
    ("stop", "code", "stderr"),
    [(signal.SIGINT, 130, ""), (signal.SIGTERM, 0, DRAINING)],
)
def test_a_signal_ends_what_runs_politely(
    folder: str, stop: signal.Signals, code: int, stderr: str
) -> None:
    options = ("--model", folder, "--dry-run", "--access-log", "--shutdown-timeout=0.2")
    with process(*options, MINFER_API_KEY="secret") as (running, url):
        assert httpx.get(f"{url}/v1/models").status_code == 401
        key = {"authorization": "Bearer secret"}
        body = {"prompt": "x", "max_tokens": 90_000, "ignore_eos": True, "stream": True}
        post = f"{url}/v1/completions"
        with httpx.stream("POST", post, json=body, headers=key, timeout=30) as answer:
            lines = answer.iter_lines()
            assert next(events(lines))["model"] == "a-tiny-model"
            running.send_signal(stop)
            last = [line for line in lines if line][-1]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["message"] == "the server is shutting down"
        out, err = running.communicate(timeout=30)
        assert (running.returncode, unexpected(err)) == (code, stderr)
        (line,) = [line for line in out.split("\n") if "POST /v1/completions 200" in line]
        name = answer.headers["x-request-id"]
        assert re.search(rf" ms id={name} key=key model=\S+ tokens=1\+\d+$", line)


def test_an_occupied_port_is_reported_before_loading(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "AsyncLLM", None)  # loading would fail
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = occupied.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    err = capsys.readouterr().err
    start, error = err.splitlines()
    assert start.startswith("minfer ")
    assert error.startswith(f"minfer: cannot listen at 127.0.0.1:{port}: ")
    assert "--port" in error


@pytest.mark.parametrize(
    ("host", "port"),
    [
        ("no.such.host.invalid", 0),
        ("127.0.0.1", 70_000),
        ("127.0.0.1", -1),
        ("x" * 70, 0),
        ("192.0.2.1", 0),
    ],
)
def test_an_address_that_cannot_be_is_named(host: str, port: int) -> None:
    with pytest.raises(
        ConfigError, match=r"cannot listen at .*; choose with --host and --port"
    ):
        listen_at(host, port)


def test_a_port_is_taken_from_the_start_on() -> None:
    (first,) = listen_at("127.0.0.1", 0)
    with first, pytest.raises(ConfigError, match="in use"):
        listen_at("127.0.0.1", first.getsockname()[1])


def test_several_sockets_share_an_address_and_no_other_server_does() -> None:
    with contextlib.ExitStack() as stack:
        sockets = [
            stack.enter_context(listener) for listener in listen_at("127.0.0.1", 0, 3)
        ]
        (port,) = {listener.getsockname()[1] for listener in sockets}
        for count in (1, 2):
            with pytest.raises(ConfigError, match="in use"):
                listen_at("127.0.0.1", port, count)


def test_a_model_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "0", "--model", "/no/such/folder"]) == 2
    assert "/no/such/folder" in capsys.readouterr().err


def test_an_answer_does_not_wait_for_the_receipt_of_its_first_packet(
    slow: Serving,
) -> None:
    times = []
    for _ in range(15):
        started = time.monotonic()
        assert slow.get("/version").status_code == 200
        times.append(time.monotonic() - started)
    assert min(times) < 0.03  # 3 ms on an idle machine; each 44 without TCP_NODELAY


@pytest.mark.long
def test_draining_waits_until_answers_are_written_and_no_longer_than_it_may() -> None:
    drain_seconds: list[float] = []
    client = SimpleNamespace(drain=drain_seconds.append)
    records = SimpleNamespace(live=1)  # the engine is done with it, its client is not
    application: Any = SimpleNamespace(
        state=SimpleNamespace(llm=SimpleNamespace(client=client)), records=records
    )

    async def seconds(patience: float, work: float = 60, signals: int = 0) -> float:
        options = HttpOptions(names=["x"], shutdown_timeout=patience)
        http_server = HttpServer(http_config(application, options), options, lambda: None)
        for _ in range(signals):
            http_server.handle_exit(signal.SIGTERM, None)
        started = time.monotonic()
        asyncio.get_running_loop().call_later(work, setattr, records, "live", 0)
        await http_server._drain(application)
        return time.monotonic() - started

    assert 0.3 <= asyncio.run(seconds(60, work=0.3)) < 60
    records.live = 1
    assert 0.05 <= asyncio.run(seconds(0.05)) < 60
    assert asyncio.run(seconds(60, signals=2)) < 60
    assert drain_seconds == [0, 0, 0]


@pytest.mark.parametrize(
    ("cores", "api_servers"),
    [(None, 1), (1, 1), (7, 1), (8, 2), (15, 3), (16, 4), (256, 4)],
)
def test_four_cores_get_a_front_up_to_four(
    cores: int | None, api_servers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert server.api_servers_by_cores() == api_servers

"""Backends that join, drain and leave."""

import asyncio
import contextlib
from typing import Any

import pytest

from minfer.effects.cli.main import main
from minfer.effects.proxy import health
from minfer.effects.proxy.backends import read_backends
from minfer.values.checks import ConfigError
from tests.effects.proxy.fakes import routing, run
from tests.effects.waiting import soon


def test_a_backend_leaves_and_joins_as_its_health_says() -> None:
    @run
    async def _() -> None:
        async with routing(2, policy="round_robin") as harness:
            first, second = harness.backends
            names = {backend.url for backend in harness.backends}
            state = harness.router.dispatcher

            def available() -> set[str]:
                return {replica.name for replica in state.available()}

            assert available() == names
            first.health = 500
            await harness.health(first.url)
            assert available() == {second.url}
            assert {await harness.answered_by("x") for _ in range(4)} == {second.name}
            first.health = 404  # it has no such address, and is there
            await harness.health(first.url)
            assert available() == names
            first.ready = 503
            await harness.health(first.url)
            assert available() == {second.url}
            assert first.url in state.state.replicas, "it drains"
            first.ready = 200
            await harness.health(first.url)
            assert available() == names


def test_silence_counts_only_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    @run
    async def _() -> None:
        async with routing(1) as harness:
            monkeypatch.setattr(health, "PROBE_TIMEOUT_SECONDS", 0.01)
            (backend,) = harness.backends
            port = int(backend.url.rsplit(":", 1)[1])
            await backend.stop()
            writers = list[asyncio.StreamWriter]()
            mute = await asyncio.start_server(
                lambda _, writer: writers.append(writer), "127.0.0.1", port
            )
            for left in (1, 1, 0):
                await harness.health(backend.url)
                assert len(harness.router.dispatcher.available()) == left
            for writer in writers:
                writer.close()
                await writer.wait_closed()
            mute.close()


def test_backends_are_asked_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PROBE_INTERVAL_SECONDS", 0.01)

    @run
    async def _() -> None:
        async with routing(1, down=1) as harness:
            (backend,) = harness.backends
            assert (await harness.chat("a")).status_code == 503
            await backend.start(int(backend.url.rsplit(":", 1)[1]))
            await soon(lambda: len(harness.router.dispatcher.available()) == 1)
            assert await harness.answered_by("a") == "a"
            await backend.stop()
            await soon(lambda: not harness.router.dispatcher.available())


@pytest.mark.parametrize(
    "url",
    [
        "host:8000",
        "ftp://host",
        "http://",
        "http://user:pass@host",
        "http://host:0",
        "http://host:99999",
        "http://host/?a=1",
        "http://host/a b",
        "http://[::1",
        "http://höst",
    ],
)
def test_what_is_no_backend_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--backend"):
        read_backends([url])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "name at least one server: --backend"),
        (["--kv-events", "tcp://a:1"], "--kv-events and --model need each other"),
        (["--model", "m"], "--kv-events and --model need each other"),
        (["--max-body-size", "0"], "--max-body-size must be a whole number from 1"),
        (["--backend-timeout", "0"], "--backend-timeout must be a number of seconds"),
        (["--routing", "nearest"], "invalid choice: 'nearest'"),
    ],
)
def test_options_that_cannot_be_used(
    options: list[str], message: str, capsys: Any
) -> None:
    backend_options = ["--backend", "http://a"] if options else []
    with contextlib.suppress(SystemExit):  # argparse's own
        assert main(["route", *backend_options, *options]) == 2
    assert message in capsys.readouterr().err


def test_addresses_of_backends() -> None:
    urls = read_backends(["http://A:1/v1/", "https://[::1]:2/base/v1", "http://b/"])
    assert urls == ("http://a:1", "https://[::1]:2/base", "http://b")
    for wrong in ([], ["http://a", "http://A/v1"]):
        with pytest.raises(ConfigError, match="--backend"):
            read_backends(wrong)

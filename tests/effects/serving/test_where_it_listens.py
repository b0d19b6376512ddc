"""Unix sockets, paths before all addresses, and origins as vLLM has them."""

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minfer import ConfigError
from minfer.effects.serving.processes.server import (
    HttpOptions,
    describe_address,
    listen_at,
)
from minfer.effects.serving.wire.origins import read_origins
from minfer.effects.serving.wire.root_path import RootPath, read_root_path
from minfer.effects.serving.wire.unix_sockets import PREFIX


def test_origins_may_be_a_list_in_json() -> None:
    assert read_origins(['["*"]']) == ["*"]
    assert read_origins(["https://a.b", '["http://c:80", "null"]']) == [
        "https://a.b",
        "http://c:80",
        "null",
    ]
    for words in (["example.com"], ["['*']"], ["[1]"], ["https://a.b/path"], ["["]):
        with pytest.raises(ConfigError, match="--allowed-origins"):
            read_origins(words)


def test_addresses_are_served_with_and_without_a_root_path() -> None:
    seen: list[tuple[str, bytes]] = []

    async def app(scope: Any, *_: Any) -> None:
        seen.append((scope["path"], scope["raw_path"]))

    outer = RootPath(app, read_root_path("/llm/"))
    for path in ("/llm/v1/models", "/v1/models", "/llmx/v1", "/llm"):
        scope = {"type": "http", "path": path, "raw_path": path.encode()}
        asyncio.run(outer(scope, None, None))  # type: ignore[arg-type]  # not used
    assert seen == [
        ("/v1/models", b"/v1/models"),
        ("/v1/models", b"/v1/models"),
        ("/llmx/v1", b"/llmx/v1"),
        ("/llm", b"/llm"),
    ]
    assert read_root_path("") == read_root_path("/") == ""
    with pytest.raises(ConfigError, match="begins with a slash"):
        read_root_path("llm")


def test_a_server_may_listen_at_a_path(tmp_path: Path) -> None:
    path = str(tmp_path / "s.sock")
    for _ in range(2):  # the second one replaces what the first one left
        listeners = listen_at(f"{PREFIX}{path}", 0, 2)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
        assert path in describe_address(listeners[0], HttpOptions(names=["m"]))
        with pytest.raises(ConfigError, match="choose another path with --uds"):
            listen_at(f"{PREFIX}{path}", 0)  # that is in use
        for listener in listeners:
            listener.close()
    with pytest.raises(ConfigError, match="No such file"):
        listen_at(f"{PREFIX}{tmp_path}/none/s.sock", 0)
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(ConfigError, match="in use"):
        listen_at(f"{PREFIX}{file}", 0)
    assert file.read_text() == "x"


def test_a_server_removes_no_socket_but_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr("atexit.register", at_exit.append)
    path = tmp_path / "s.sock"
    with listen_at(f"{PREFIX}{path}", 0)[0]:
        (ours,) = at_exit
        for in_use in (str(path), ""):
            with pytest.raises(ConfigError, match="choose another path with --uds"):
                listen_at(f"{PREFIX}{in_use}", 0)
        assert at_exit == [ours]  # a server that could not listen removes nothing
        assert path.is_socket()
        monkeypatch.chdir("/")
        ours()
        assert not path.exists()

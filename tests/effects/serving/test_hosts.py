"""Which names requests may be for, where a page could have its name's address changed."""

import argparse
import json
import socket
from typing import Any

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from minfer.effects.cli.serve import add_options
from minfer.effects.serving.access.hosts import Hosts, read_hosts
from minfer.values.checks import ConfigError
from tests.circles import claimed, long
from tests.effects.serving.test_server import process

LOCAL = (
    *("localhost", "LOCALHOST", "localhost.", "a.localhost", "127.0.0.1", "127.8.9.1"),
    *("[::1]", "[0:0::1]", "[::ffff:127.0.0.1]"),
)
FOREIGN = (
    *("evil.example", "localhost.evil.example", "evil-localhost", "127.0.0.1.evil", ""),
    *("0.0.0.0", "[::]", "10.0.0.1", "[fe80::1]"),  # noqa: S104 - names, not bound
    *("::1", "127.0.0.1@evil", "2130706433"),
    *("localhost/", "[localhost]", "localhost:80:80", "http://localhost", "a b", "*"),
)


@pytest.mark.parametrize("port", ["", ":", ":80", ":8000"])
def test_this_machines_names_are_allowed_at_any_port_and_no_others(port: str) -> None:
    assert [name for name in LOCAL if not Hosts().allows(name + port)] == []
    foreign = [name for name in FOREIGN if name != "::1" or not port]
    assert [name for name in foreign if Hosts().allows(name + port)] == []
    assert all(Hosts(("*",)).allows(name + port) for name in LOCAL + FOREIGN)
    hosts = Hosts(("api.example", "10.0.0.1"))
    allowed = ("api.example", "API.Example.", "10.0.0.1", *LOCAL)
    assert all(hosts.allows(name + port) for name in allowed)
    foreign_names = ("x.api.example", "api.example.x", "10.0.0.2", "evil.example")
    assert not any(hosts.allows(name + port) for name in foreign_names)


def parse(*arguments: str, has_keys: bool = False) -> Hosts | None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return read_hosts(parser.parse_args(arguments), has_keys=has_keys)


def test_names_are_compared_without_keys_at_a_loopback_address() -> None:
    assert parse() == parse("--host", "::1") == parse("--host", "localhost") == Hosts()
    assert parse("--host", "127.0.0.5") == Hosts()
    assert parse(has_keys=True) is parse("--host", "0.0.0.0") is None  # noqa: S104
    assert parse("--host", "nowhere.invalid") is None
    two = ("--allowed-host", "A.example.", "--allowed-host", "[FE80::1]")
    hosts = Hosts(("a.example", "fe80::1"))
    assert parse(*two) == parse(*two, has_keys=True) == hosts
    assert parse(*two, "--host", "0.0.0.0") == hosts  # noqa: S104


BAD = ("a:80", "http://a", "a/b", "", "*.example", "[a]", "a b", "ä.example")


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-host must be a host name"):
        parse("--allowed-host", name)


REQUESTED: list[tuple[str, str, dict[str, Any] | None]] = [
    ("GET", "/live", None),
    ("GET", "/v1/models", None),
    ("GET", "/", None),
    ("GET", "/metrics", None),
    ("GET", "/nothing", None),
    ("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1}),
    ("POST", "/v1/messages", {}),
    ("POST", "/reset_prefix_cache", None),
    ("DELETE", "/v1/requests/a", None),
]


def status(url: str, host: str, method: str, path: str, body: Any = None) -> Any:
    headers = {"host": host, "origin": f"http://{host}"}
    with httpx.stream(method, url + path, json=body, headers=headers) as answer:
        refused = answer.status_code == 403
        return answer.status_code, answer.read().decode() if refused else ""


@pytest.mark.parametrize("api_servers", [*long([0]), *claimed([1])])
def test_a_page_whose_name_was_given_this_address_reads_nothing(api_servers: int) -> None:
    options = (
        "--dry-run",
        f"--api-processes={api_servers}",
        "--allowed-host=api.example",
    )
    with process(*options) as (_, url):
        port = url.rsplit(":", 1)[1]
        base = url.replace("http", "ws", 1)
        for method, path, body in REQUESTED:
            for host in ("evil.example", f"evil.example:{port}"):
                code, text = status(url, host, method, path, body)
                assert code == 403, path
                assert "evil.example" in text
                assert "--allowed-host evil.example" in text
                json.loads(text)
            for host in ("api.example", f"localhost:{port}", "api.example:9"):
                assert status(url, host, method, path, body)[0] != 403, path
        for host in ("evil.example", f"127.0.0.1:{port}"):
            assert status(url, host, "GET", "/health")[0] == 200
        for path in ("/v1/stream", "/live"):
            named = f"ws://evil.example:{port}{path}"
            sock = socket.create_connection(("127.0.0.1", int(port)))
            with (
                sock,
                pytest.raises(InvalidStatus) as refused,
                connect(named, sock=sock),
            ):
                pass
            assert refused.value.response.status_code == 403
            assert b"--allowed-host" in refused.value.response.body
        with connect(f"{base}/v1/stream") as link:
            link.send("{}")
            assert "error" in str(link.recv(10))

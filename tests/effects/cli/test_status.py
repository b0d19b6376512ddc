"""`minfer status` of servers, routers, and what is neither."""

import contextlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from minfer.effects.cli import status
from minfer.effects.cli.main import main
from tests.effects.served import Serving, serving

REPLICA = {
    "replica": "0",
    "role": "decode",
    "machine": "node-a (10.0.0.1)",
    "status": "ready",
    "running": 12,
    "waiting": 3,
    "kv_cache_usage": 0.256,
}
LOADS = {**REPLICA, "replica": "1", "machine": "", "status": "loading \x1b[31m"}
SERVER = {
    "status": "ready",
    "model": "m",
    "version": "9.9",
    "running": 12,
    "waiting": 3,
    "ready": "1 of 2 replicas",
    "replicas": [REPLICA, LOADS],
}
BACKEND = {"url": "http://10.0.0.9:8000", "health": "down", "requests": 4}
ROUTER = {"policy": "prefix", "waiting": 2, "backends": [BACKEND]}


@contextmanager
def answering(answers: dict[str, tuple[int, bytes]], key: str = "") -> Iterator[str]:
    """A server with these answers, by path; with a `key`, for those that send it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers.get(self.path, (404, b"none"))
            if key and self.headers["Authorization"] != f"Bearer {key}":
                status, body = 401, b"{}"
            self.send_response(status)
            if status == 302:
                self.send_header("Location", "/else")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=[0.01])
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def json_answer(content: object, status: int = 200) -> tuple[int, bytes]:
    return status, json.dumps(content).encode()


def test_a_server_with_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    with answering({"/ready": json_answer(SERVER)}) as url:
        assert main(["status", url.removeprefix("http://") + "/v1/"]) == 0
    head, counts, *table = capsys.readouterr().out.splitlines()
    assert head == f"{url}, m, minfer 9.9: ready (1 of 2 replicas)"
    assert counts == "12 running, 3 waiting"
    assert [re.split(" {2,}", line) for line in table] == [
        ["replica", "role", "machine", "state", "running", "waiting", "KV cache"],
        ["0", "decode", "node-a (10.0.0.1)", "ready", "12", "3", "26%"],
        ["1", "decode", "-", r"'loading \x1b[31m'", "12", "3", "26%"],
    ]
    assert len({len(line) for line in table}) == 1, "its columns are aligned"


def test_a_server_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(executor="dry", service={"api_key": "k"}) as served:
        check_alone(served, capsys)


def check_alone(served: Serving, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", served.url]) == 0
    head, counts, titles, row = capsys.readouterr().out.splitlines()
    assert head.startswith(f"{served.url}, tiny, minfer ")
    assert head.endswith(": ready")
    assert counts == "0 running, 0 waiting"
    assert titles.split()[:3] == ["replica", "role", "machine"]
    assert row.split()[:2] == ["0", "both"]
    assert row.split()[-4:] == ["ready", "0", "0", "0%"]


@pytest.mark.parametrize("ready", [{"status": "loading the model"}, SERVER])
def test_one_that_is_not_ready_says_why(
    capsys: pytest.CaptureFixture[str], ready: dict[str, Any]
) -> None:
    content = {**ready, "status": "loading the model"}
    with answering(
        {"/ready": json_answer(content, 503), "/router": (503, b"early")}
    ) as url:
        assert main(["status", url]) == 1
    assert ": not ready: loading the model" in capsys.readouterr().out


def test_a_router_may_need_a_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MINFER_API_KEY", raising=False)
    answers = {"/ready": json_answer({"status": "ready"}), "/router": json_answer(ROUTER)}
    with answering(answers, "k") as url:
        for key_options in ([], ["--api-key", "wrong"]):
            assert main(["status", url, *key_options]) == 2
            assert "give it with --api-key or MINFER_API_KEY" in capsys.readouterr().err
        monkeypatch.setenv("MINFER_API_KEY", "k")
        assert main(["status", url]) == 0
        monkeypatch.setenv("MINFER_API_KEY", "wrong")
        assert main(["status", url, "--api-key", "k"]) == 0
    head, counts, _, row = capsys.readouterr().out.splitlines()[4:]
    assert head == f"{url}, router, policy prefix: ready"
    assert counts == "4 running, 2 waiting"
    assert row.split() == ["0", "-", "http://10.0.0.9:8000", "down", "4", "-", "-"]


@pytest.mark.parametrize(
    "answer",
    [
        (200, b"<html>"),
        json_answer([1]),
        json_answer({"status": 3}),
        (404, b""),
        (302, b""),
    ],
)
def test_what_is_none_of_minfers_is_named(
    capsys: pytest.CaptureFixture[str], answer: tuple[int, bytes]
) -> None:
    with answering({"/ready": answer, "/else": json_answer(SERVER)}) as url:
        assert main(["status", url]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"{url} is no server of minfer: it answers /ready with HTTP {answer[0]}" in err


def test_where_nobody_listens_or_speaks_as_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with answering({}) as plain:
        for url in ("http://127.0.0.1:9", plain.replace("http", "https")):
            assert main(["status", url]) == 2
            assert capsys.readouterr().err.startswith(f"minfer: {url} cannot be asked: ")


@pytest.mark.parametrize("url", ["ftp://a", "http://", "a:99999", "a/?b=c", "a#b"])
def test_what_is_no_address(capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert main(["status", url]) == 2
    assert "is no address of a server" in capsys.readouterr().err


@pytest.mark.long
def test_a_key_that_no_header_can_have_is_not_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["status", "127.0.0.1:1", "--api-key", "sec\nret"]) == 2
    message = capsys.readouterr().err
    assert "the API key" in message
    assert "ret" not in message.replace("MINFER", "").replace("character", "")


@pytest.mark.parametrize(
    "answer",
    [
        b"\x1b[2Jno HTTP\r\n",
        b"HTTP/1.1 503 x\r\nTransfer-Encoding: chunked\r\n\r\n99\r\ncut",
        b"HTTP/1.1 200 x\r\nTransfer-Encoding: chunked\r\n\r\n99\r\ncut",
    ],
    ids=["no HTTP", "an error that is cut short", "an answer that is cut short"],
)
def test_broken_http(answer: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def reply() -> None:
            with server.accept()[0] as client:
                client.recv(4096)
                client.sendall(answer)

        thread = threading.Thread(target=reply)
        thread.start()
        assert main(["status", f"http://127.0.0.1:{server.getsockname()[1]}"]) == 2
        thread.join()
    text = capsys.readouterr().err
    assert "cannot be asked" in text
    assert text.strip().isprintable(), "no escape sequence reaches the terminal"


@pytest.mark.parametrize("begin", [b"", b"HTTP/1.1 200 x\r\n\r\n"])
def test_one_that_sends_a_byte_now_and_then(
    begin: bytes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "_TIMEOUT_SECONDS", 0.2)
    over = threading.Event()

    def drip() -> None:
        with server.accept()[0] as client, contextlib.suppress(OSError):
            client.sendall(begin)
            while not over.wait(0.02):
                client.sendall(b"a")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=drip)
        thread.start()
        timer = threading.Timer(20.0, over.set)
        timer.start()
        assert main(["status", f"http://127.0.0.1:{server.getsockname()[1]}"]) == 2
        assert not over.is_set()
        timer.cancel()
        over.set()
        thread.join()
    assert "cannot be asked: it did not answer within 0.2 s" in capsys.readouterr().err


def test_numbers_of_a_router_that_have_no_sum(capsys: pytest.CaptureFixture[str]) -> None:
    backends = [{**BACKEND, "requests": count} for count in (10**400, 1.5)]
    router = json_answer({**ROUTER, "backends": backends})
    with answering(
        {"/ready": json_answer({"status": "ready"}), "/router": router}
    ) as url:
        assert main(["status", url]) == 0
    assert capsys.readouterr().out == f"{url}: ready\n"

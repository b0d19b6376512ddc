"""`minfer serve` as a process: how it starts, what stops it, and what it refuses to start
with.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest

from minfer.config import ConfigError
from minfer.effects.cli.main import main
from minfer.effects.serving import server
from minfer.effects.serving.server import bound
from tests.effects.served import Serving, events
from tests.effects.test_imports import loaded_by

SERVE = [sys.executable, "-m", "minfer", "serve", "--port", "0"]


SLACK = 4


@contextlib.contextmanager
def process(*options: str, **more: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server that is ready, and its address."""
    env = {**os.environ, **more}
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
            yield running, ready.split()[-1].removesuffix("/v1")
        finally:
            running.kill()


def test_a_dry_run_is_healthy_in_two_seconds() -> None:
    started = time.monotonic()
    with process("--dry-run") as (running, url):
        assert httpx.get(f"{url}/healthz").status_code == 200
        assert time.monotonic() - started < 2 * SLACK
        found = httpx.post(
            f"{url}/v1/chat/completions",
            timeout=30,
            json={"messages": [{"role": "user", "content": "x"}], "temperature": 0},
        )
        assert (
            "not written by a model" in found.json()["choices"][0]["message"]["content"]
        )
        running.send_signal(signal.SIGTERM)
        out, err = running.communicate(timeout=30)
        assert (running.returncode, out, err) == (0, "", "")


def test_a_dry_run_loads_no_torch() -> None:
    code = """
from minfer.effects.serving.application import Application
from minfer.effects.live.async_llm import AsyncLLM
llm = AsyncLLM(executor="dry")
Application(llm, ["x"])
llm.close()
"""
    assert not {"torch", "transformers", "safetensors"} & loaded_by(code)


@pytest.mark.parametrize(("stop", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_ends_what_runs_politely(
    folder: str, stop: signal.Signals, code: int
) -> None:
    options = ("--model", folder, "--dry-run", "--access-log")
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
        assert (running.returncode, err) == (code, "")
        assert '"POST /v1/completions HTTP/1.1" 200' in out


def test_an_occupied_port_is_told_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "AsyncLLM", None)  # loading would fail
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"minfer: cannot listen at 127.0.0.1:{port}: ")
    assert "--port" in err
    assert err.count("\n") == 1


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
        bound(host, port)


def test_a_port_is_taken_from_the_start_on() -> None:
    with bound("127.0.0.1", 0) as first, pytest.raises(ConfigError, match="in use"):
        bound("127.0.0.1", first.getsockname()[1])


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


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/", 404),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/completions", 405),
        ("POST", "/health", 405),
    ],
)
def test_a_wrong_address_has_openais_shape(
    slow: Serving, method: str, path: str, status: int
) -> None:
    found = slow.http.request(method, slow.url + path)
    assert found.status_code == status
    assert found.json()["error"]["type"] == "invalid_request_error"


def test_a_broken_engine_is_told_and_unhealthy(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(folder, **SLOW) as served:
        stream = served.http.stream(
            "POST",
            f"{served.url}/v1/completions",
            json={"prompt": "x", "max_tokens": 500, "stream": True, "ignore_eos": True},
        )
        with stream as answer:
            lines = answer.iter_lines()
            next(events(lines))
            monkeypatch.setattr(served.llm.worker.driver, "turn", lambda: 1 / 0)
            rest = [line for line in lines if line]
        error = json.loads(rest[-1].removeprefix("data: "))["error"]
        assert (error["type"], error["code"]) == ("server_error", "engine_dead")
        health = served.get("/healthz")
        assert health.status_code == 503
        assert "ZeroDivisionError" in health.json()["status"]
        refused = served.post("completions", prompt="x")
        assert (refused.status_code, refused.json()["error"]["code"]) == (
            503,
            "engine_dead",
        )


def test_an_engine_that_makes_no_progress_is_unhealthy(folder: str) -> None:
    with serving(folder, service={"stall": 0.2}, **SLOW) as served:
        executor: Any = served.llm.worker.driver.executor
        assert served.post("completions", prompt="x", max_tokens=3).status_code == 200
        executor.seconds = 0.5
        thread = threading.Thread(
            target=served.post,
            args=("completions",),
            kwargs={"prompt": "x", "max_tokens": 2},
        )
        thread.start()
        seen = set()
        while thread.is_alive():
            seen.add(served.get("/health").status_code)
        thread.join()
        assert seen == {200, 503}
        assert served.get("/health").status_code == 200


def test_steps_that_fail_are_a_server_error(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(
        folder, executor="oracle", num_gpu_blocks_override=64, max_model_len=99
    ) as served:
        broken = served.llm.worker.driver.executor
        assert isinstance(broken, Oracle)
        monkeypatch.setattr(
            broken, "collect", lambda: broken.fail("device error", halfway=False)
        )
        for stream in (False, True):
            found = served.post("completions", prompt="x", stream=stream)
            assert found.status_code == 500
            error = found.json()["error"]
            assert (error["type"], error["code"]) == ("server_error", "engine_error")
            assert "device error" in error["message"]
        monkeypatch.undo()
        assert served.post("completions", prompt="x").status_code == 200


def test_a_server_that_stops_tells_its_clients_during_a_step(folder: str) -> None:
    with serving(folder, **{**SLOW, "step": 1.0}) as served:
        answers: list[httpx.Response] = []
        thread = threading.Thread(
            target=lambda: answers.append(
                served.post("completions", prompt="x", max_tokens=99)
            )
        )
        thread.start()
        served.until(lambda: bool(served.turns))
        served.service.close()
        thread.join()
        assert len(served.turns) <= 2  # of 100
        assert answers[0].status_code == 503
        assert answers[0].json()["error"]["message"] == "the server is shutting down"
        assert served.get("/health").json() == {"status": "the server is shutting down"}
        assert served.post("completions", prompt="x").status_code == 503
        served.idle()


def test_a_full_line_is_503_with_retry_after(folder: str) -> None:
    with serving(folder, max_num_seqs=1, max_waiting=2, **SLOW) as served:
        body = {"prompt": "x", "max_tokens": 5000, "ignore_eos": True}

        def one_runs(line: int) -> bool:
            state = served.llm.worker.driver.state
            return (len(state.running), len(state.waiting)) == (1, line)

        links = []
        for count in range(3):
            links.append(asking(served, json.dumps(body).encode()))
            served.until(partial(one_runs, count))
        found = served.post("completions", **body)
        assert (found.status_code, found.headers["retry-after"]) == (503, "1")
        assert found.json()["error"]["code"] == "overloaded"
        for link in links:
            link.close()
        served.idle()
        assert served.post("completions", prompt="x", max_tokens=1).status_code == 200


# --- bad input, beside a neighbour ------------------------------------------------------


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def asking(served: Serving, data: bytes, *, sent: int | None = None) -> socket.socket:
    """A connection on which a completion was asked for, or so many bytes of
    it were sent.
    """
    link = socket.create_connection(("127.0.0.1", served.port))
    link.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(data) + data[:sent])
    return link


def raw(
    served: Serving,
    data: bytes,
    *,
    path: str = "completions",
    length: int | None = None,
    media: str = "application/json",
    more: str = "",
) -> tuple[int, Any]:
    """Send a body as it is; returns status and parsed answer."""
    head = (
        f"POST /v1/{path} HTTP/1.1\r\nHost: x\r\nContent-Type: {media}\r\n{more}"
        f"Content-Length: {len(data) if length is None else length}\r\n\r\n"
    )
    return exchange(served, head.encode() + data)


def exchange(served: Serving, data: bytes) -> tuple[int, Any]:
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as link:
        link.sendall(data)
        got = b""
        while b"\r\n\r\n" not in got:
            got += link.recv(65536)
        head, _, body = got.partition(b"\r\n\r\n")
        size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        while len(body) < size:
            body += link.recv(65536)
    return int(head.split()[1]), json.loads(body)


NEIGHBOUR = {
    "prompt": "neighbour",
    "max_tokens": 40,
    "ignore_eos": True,
    "seed": 1,
    "stream": True,
}


@pytest.fixture(scope="module")
def quiet(slow: Serving) -> list[str]:
    """What the neighbour gets when it is alone."""
    answer = slow.post("completions", **NEIGHBOUR)
    return [e["choices"][0]["text"] for e in events(iter(answer.text.split("\n")))]


BAD: dict[str, tuple[int, dict[str, Any]]] = {
    "unknown field": (400, {"data": b'{"prompt": "x", "foo": 1}'}),
    "wrong type": (400, {"data": b'{"prompt": 5}'}),
    "out of range": (400, {"data": b'{"prompt": "x", "temperature": 1e6}'}),
    "NaN": (400, {"data": b'{"prompt": "x", "temperature": NaN}'}),
    "infinite": (400, {"data": b'{"prompt": "x", "temperature": 1e999}'}),
    "huge number": (400, {"data": b'{"prompt": "x", "max_tokens": ' + b"9" * 400 + b"}"}),
    "invalid UTF-8": (400, {"data": b'{"prompt": "\xff\xfe"}'}),
    "lone surrogate": (400, {"data": b'{"prompt": "\\udfff"}'}),
    "deep": (400, {"data": b'{"prompt": ' + b"[" * 200_000}),
    "deep in messages": (
        400,
        {"data": b'{"messages": ' + b'[{"a":' * 100_000, "path": "chat/completions"},
    ),
    "empty": (400, {"data": b""}),
    "cut off": (400, {"data": b'{"prompt": "x'}),
    "unknown model": (404, {"data": b'{"model": "gpt-4", "prompt": "x"}'}),
    "no JSON": (415, {"data": b"prompt=x", "media": "application/x-www-form-urlencoded"}),
    "too large, announced": (413, {"data": b"", "length": 100_000_000}),
    "too large, asked first": (
        413,
        {"data": b"", "length": 100_000_000, "more": "Expect: 100-continue\r\n"},
    ),
    "empty prompt": (400, {"data": b'{"prompt": ""}'}),
    "prompt too long": (400, {"data": b'{"prompt": "' + b"a" * 100_500 + b'"}'}),
    "ids out of range": (400, {"data": b'{"prompt": [[1, 99999999999]]}'}),
    "too many prompts": (400, {"data": b'{"prompt": [' + b'"a",' * 9999 + b'"a"]}'}),
    "no template": (
        400,
        {
            "data": b'{"messages": [{"role": "user", "content": "x"}]}',
            "path": "chat/completions",
        },
    ),
}


@pytest.mark.parametrize(("status", "asked"), BAD.values(), ids=BAD)
def test_bad_input_harms_nobody_else(
    slow: Serving, quiet: list[str], status: int, asked: dict[str, Any]
) -> None:
    url = f"{slow.url}/v1/completions"
    with contextlib.ExitStack() as stack:
        with slow.after(steps=5):
            neighbour = stack.enter_context(slow.http.stream("POST", url, json=NEIGHBOUR))
            stream = events(neighbour.iter_lines())
            got = [next(stream)["choices"][0]["text"]]
            found, said = raw(slow, **asked)
            assert len(slow.llm.front.jobs) == 1
        got += [event["choices"][0]["text"] for event in stream]
    assert found == status
    error = said["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert "".join(got) == "".join(quiet)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_100_megabytes(slow: Serving, quiet: list[str], chunked: bool) -> None:
    size = 100_000_000
    piece = b"a" * 1_000_000
    if chunked:
        parts = [HEAD + b"Transfer-Encoding: chunked\r\n\r\n"]
        parts += [b"%x\r\n%b\r\n" % (len(piece), piece)] * 100 + [b"0\r\n\r\n"]
    else:
        parts = [HEAD + b"Content-Length: %d\r\n\r\n" % size, *[piece] * 100]
    with slow.http.stream("POST", f"{slow.url}/v1/completions", json=NEIGHBOUR) as beside:
        stream = events(beside.iter_lines())
        got = [next(stream)["choices"][0]["text"]]
        found, said = exchange(slow, b"".join(parts))
        got += [event["choices"][0]["text"] for event in stream]
    assert found == 413
    assert "more than 4194304 bytes" in said["error"]["message"]
    assert "".join(got) == "".join(quiet)


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no') }}", "{% for", "{{ 1 / 0 }}", "{{ x.y.z }}"]
)
def test_a_chat_template_that_fails(
    bundled: Serving, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundled.llm.tokenizer, "chat_template", template)
    found = bundled.post("chat/completions", messages=[{"role": "user", "content": "x"}])
    assert found.status_code == 400
    assert found.json()["error"]["param"] == "messages"
    assert "template" in found.json()["error"]["message"]


def test_template_arguments_cannot_take_the_place_of_ours(bundled: Serving) -> None:
    for name in (
        "messages",
        "template",
        "tools",
        "special_tokens",
        "add_generation_prompt",
    ):
        found = bundled.post(
            "chat/completions",
            messages=[{"role": "user", "content": "x"}],
            max_tokens=1,
            chat_template_kwargs={name: "x"},
        )
        assert found.status_code in (200, 400)


# --- clients that go away ---------------------------------------------------------------


def test_a_client_that_goes_away_is_cancelled(folder: str) -> None:
    with serving(folder, **SLOW) as served:
        whole = served.available()
        body = json.dumps(
            {"prompt": "x" * 50, "max_tokens": 50_000, "ignore_eos": True}
        ).encode()
        streamed = body[:-1] + b', "stream": true, "n": 3}'

        def ran(turns: int) -> bool:
            return len(served.turns) > turns

        for data in (body, streamed, body, streamed):
            link = asking(served, data)
            before = len(served.turns)
            served.until(partial(ran, before + 10))
            assert served.available() < whole
            link.close()
            left = len(served.turns)
            served.idle()
            # Noticed at once, and gone from the engine at the turn after that.
            assert len(served.turns) - left < 1000
            assert served.turns[-1][1].state.blocks.available == whole
        assert served.cancelled() == [True] * 4


def test_a_client_that_goes_away_while_its_prompts_are_prepared(folder: str) -> None:
    with serving(folder, **SLOW) as served:
        data = json.dumps({"prompt": "x" * (LONG + 1000), "max_tokens": 50_000}).encode()
        for sent in (None, 100, 0):
            asking(served, data, sent=sent).close()
        assert served.post("completions", prompt="x", max_tokens=2).status_code == 200
        served.idle()
        assert served.available() == 4000


def test_half_of_a_crowd_leaves_and_the_others_do_not_notice(folder: str) -> None:
    found = compared(folder, clients=32, seed=4)
    assert found.differing == []
    assert found.leaving == 16
    assert (
        found.cancelled == found.taken
    )  # each gave all back within two turns of its Cancel
    assert found.cancelled >= 5  # turns; several may leave in one
    assert found.left_over == 0


def test_prompts_of_one_answer_do_not_overtake_each_other_at_a_slow_client() -> None:
    sent: list[Any] = []
    body = json.dumps({"prompt": [[5], [6]], "stream": True, "max_tokens": 1}).encode()
    head = [(b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": head,
        "query_string": b"",
        "root_path": "",
    }
    inbox = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return inbox.pop() if inbox else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            await asyncio.sleep(
                0.3
            )  # the last answer on the connection is still to be read
        sent.append(message)

    with contextlib.closing(AsyncLLM(executor="dry", max_num_seqs=4)) as llm:
        asyncio.run(Service(llm, ["dry"])(scope, receive, send))
    assert [message["type"][14:] for message in sent] == ["start", "body", "body"]
    assert [message["more_body"] for message in sent[1:]] == [True, False]
    said = b"".join([message["body"] for message in sent[1:]])
    assert said.count(b'"finish_reason": "length"') == 2

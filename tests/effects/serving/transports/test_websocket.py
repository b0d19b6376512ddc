"""A WebSocket, as a client library of its own speaks it: many requests at once."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from starlette.types import Message, Scope
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from minfer.effects.serving.wire import websocket
from minfer.effects.serving.wire.transport import Connection, StreamEvent, ignore_part
from minfer.effects.serving.wire.websocket import SocketSession
from tests.effects.served import Serving, serving
from tests.effects.serving.raw_requests import NEIGHBOUR

ENDLESS = {"prompt": "x", "max_tokens": 50_000, "ignore_eos": True, "stream": True}


@contextlib.contextmanager
def socket(served: Serving, **headers: str) -> Iterator[ClientConnection]:
    url = served.url.replace("http", "ws") + "/v1/stream"
    with connect(url, additional_headers=headers, max_size=None) as link:
        yield link


def ask(link: ClientConnection, name: str, endpoint: str, **body: Any) -> None:
    link.send(json.dumps({"id": name, "endpoint": endpoint, "body": body}))


def receive(link: ClientConnection) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(link.recv(timeout=20))
    return message


def until_ended(link: ClientConnection, *names: str) -> dict[str, list[Any]]:
    """What is said of requests until all of them have ended, by id."""
    by_id: dict[str, list[Any]] = {name: [] for name in names}
    left = set(names)
    while left:
        message = receive(link)
        by_id[message["id"]].append(message)
        if "event" not in message:
            left.remove(message["id"])
    return by_id


def text_of(messages: list[Any]) -> str:
    return "".join(
        message["event"]["choices"][0]["text"]
        for message in messages
        if "event" in message
    )


@pytest.mark.long
def test_an_answer_is_that_of_a_post(bundled: Serving) -> None:
    body = {"prompt": "def f(", "max_tokens": 9, "temperature": 0}
    choice = bundled.post("completions", **body).json()["choices"][0]
    with socket(bundled) as link:
        ask(link, "a", "completions", **body, stream=True)
        *events, last = until_ended(link, "a")["a"]
        assert last == {"id": "a", "done": True}
        assert text_of(events) == choice["text"]
        ask(link, "a", "completions", **body)  # in one piece, under an id that is free
        (answer, last) = until_ended(link, "a")["a"]
    assert answer["event"]["choices"][0] == choice
    assert last == {"id": "a", "done": True}


MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("endpoint", "body", "last"),
    [
        ("chat", {"messages": MESSAGES, "max_tokens": 2}, "chat.completion.chunk"),
        ("responses", {"input": "hi", "max_output_tokens": 2}, "response.incomplete"),
        ("messages", {"messages": MESSAGES, "max_tokens": 2}, "message_stop"),
    ],
)
def test_every_endpoint_is_reached(
    bundled: Serving, endpoint: str, body: dict[str, Any], last: str
) -> None:
    with socket(bundled) as link:
        ask(link, "1", endpoint, **body, stream=True)
        *events, end = until_ended(link, "1")["1"]
    assert end == {"id": "1", "done": True}
    event = events[-1]["event"]
    assert event.get("type", event.get("object")) == last


@pytest.mark.long
def test_many_at_once_on_one_socket(bundled: Serving) -> None:
    bodies = {
        f"r{i}": {"prompt": f"def f{i}(", "seed": i, "max_tokens": 10, "stream": True}
        for i in range(10)
    }
    with socket(bundled) as link:
        for name, body in bodies.items():
            ask(link, name, "completions", **body)
        together = until_ended(link, *bodies)
        for name, body in bodies.items():
            ask(link, name, "completions", **body)
            assert text_of(until_ended(link, name)[name]) == text_of(together[name])


NONSENSE: dict[str, tuple[str | bytes, str | None, str]] = {
    "no JSON": ("{", None, "not valid JSON"),
    "NaN": ('{"id": NaN}', None, "not valid JSON"),
    "deep": ('{"body": ' + "[" * 10_000, None, "not valid JSON"),
    "binary": (b"{}", None, "binary"),
    "a list": ("[]", None, "must be an object"),
    "nothing": ("{}", None, "id: must be a string"),
    "a number": ('{"id": 5, "endpoint": "chat", "body": {}}', None, "id: must be"),
    "too long an id": (json.dumps({"id": "x" * 129}), None, "id: must be"),
    "no endpoint": ('{"id": "a", "body": {}}', "a", "endpoint: must be"),
    "an endpoint that is none": (
        '{"id": "a", "endpoint": "x", "body": {}}',
        "a",
        "there is completions, chat, responses, embeddings, messages",
    ),
    "no body": ('{"id": "a", "endpoint": "chat"}', "a", "body: must be an object"),
    "a field too many": (
        '{"id": "a", "endpoint": "chat", "body": {}, "more": 1}',
        "a",
        "more: is not a field here",
    ),
    "what cannot be cancelled": ('{"cancel": 5}', None, "cancel: must be an id"),
    "a body that makes no sense": (
        '{"id": "a", "endpoint": "chat", "body": {"messages": 5}}',
        "a",
        "messages: must be a list",
    ),
    "an unknown model": (
        '{"id": "a", "endpoint": "completions", "body": {"prompt": "x", "model": "y"}}',
        "a",
        "there is no model",
    ),
    "a prompt that is too long": (
        json.dumps(
            {"id": "a", "endpoint": "completions", "body": {"prompt": "x " * 4000}}
        ),
        "a",
        "maximum context length is",
    ),
}


def test_nonsense_gets_an_error_and_the_socket_stays(bundled: Serving) -> None:
    with socket(bundled) as link:
        for nonsense, name, words in NONSENSE.values():
            link.send(nonsense)
            message = receive(link)
            assert message["id"] == name, nonsense
            assert words in message["error"]["message"]
            assert message["status"] in (400, 404)
        ask(link, "a", "completions", prompt="x", max_tokens=1)
        assert until_ended(link, "a")["a"][-1] == {"id": "a", "done": True}


def test_errors_are_the_protocols(bundled: Serving) -> None:
    with socket(bundled) as link:
        ask(link, "a", "messages", messages=MESSAGES)
        error = receive(link)["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"] == "max_tokens: is missing"


def test_one_is_cancelled_and_the_other_does_not_notice(
    slow: Serving, quiet: list[str]
) -> None:
    with socket(slow) as link:
        ask(link, "endless", "completions", **ENDLESS)
        assert receive(link)["id"] == "endless"
        ask(link, "other", "completions", **NEIGHBOUR)
        link.send('{"cancel": "nobody"}')  # which may have ended already
        link.send('{"cancel": "endless"}')
        by_id = until_ended(link, "endless", "other")
    assert by_id["endless"][-1] == {"id": "endless", "done": True, "cancelled": True}
    assert text_of(by_id["other"]) == "".join(quiet)
    slow.idle()
    assert slow.available() == 4000


def test_a_disconnect_cancels_the_request(slow: Serving) -> None:
    with socket(slow) as link:
        for name in ("a", "b"):
            ask(link, name, "completions", **ENDLESS)
        assert receive(link)
        assert slow.llm.worker.driver.busy
    slow.idle()
    assert slow.available() == 4000


def test_an_id_must_be_free(slow: Serving) -> None:
    with socket(slow) as link:
        ask(link, "a", "completions", **ENDLESS)
        receive(link)
        ask(link, "a", "completions", **NEIGHBOUR)
        error = receive(link)
        while "error" not in error:
            error = receive(link)
        assert error["id"] is None  # it is not about the one that is open
        assert "'a' is being answered" in error["error"]["message"]
        link.send('{"cancel": "a"}')
        assert until_ended(link, "a")["a"][-1]["cancelled"]
    slow.idle()


def test_so_many_may_be_open(slow: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "MAX_OPEN_REQUESTS", 2)
    with socket(slow) as link:
        for name in "abc":
            ask(link, name, "completions", **{**ENDLESS, "stream": False})
        message = receive(link)
        assert (message["id"], message["status"]) == ("c", 429)
        assert message["error"]["code"] == "too_many_requests"
        link.send('{"cancel": "a"}')
        assert receive(link) == {"id": "a", "done": True, "cancelled": True}
        ask(link, "c", "completions", prompt="x", max_tokens=1)
        assert until_ended(link, "c")["c"][-1] == {"id": "c", "done": True}
    slow.idle()


@pytest.mark.long
def test_a_key_is_required_and_foreign_pages_are_refused(folder: str) -> None:
    service = {"api_key": "secret", "max_body": 1000}
    with serving(
        folder, service=service, executor="oracle", num_gpu_blocks_override=4000
    ) as served:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}):
            with pytest.raises(InvalidStatus, match="401"), socket(served, **headers):
                pass
        key = {"authorization": "Bearer secret"}
        evil = {**key, "origin": "https://evil.example"}
        with pytest.raises(InvalidStatus, match="403"), socket(served, **evil):
            pass
        with socket(served, **key, **{"x-request-id": "abc"}) as link:
            assert link.response is not None
            assert link.response.headers["x-request-id"] == "abc"
            ask(link, "a", "completions", prompt="x" * 1000)
            message = receive(link)
            assert (message["id"], message["status"]) == ("a", 413)
            ask(link, "b", "completions", prompt="x", max_tokens=1)
            assert until_ended(link, "b")["b"][-1] == {"id": "b", "done": True}


# --- without a server: clients that are slow, and handlers that break -----------------


class Client:
    """The client's side of a socket: what it says, and how it takes what it is told."""

    def __init__(self) -> None:
        self.says: asyncio.Queue[Any] = asyncio.Queue()
        self.messages: list[Any] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self.there = True
        self.accepted = asyncio.Event()

    async def receive(self) -> Any:
        return await self.says.get()

    async def send(self, message: Message) -> None:
        await self.reads.wait()
        if not self.there:
            raise OSError("gone")
        if message["type"] == "websocket.accept":
            self.accepted.set()
        else:
            self.messages.append(json.loads(message["text"]))

    def say(self, **message: Any) -> None:
        self.says.put_nowait({"type": "websocket.receive", "text": json.dumps(message)})

    def leave(self) -> None:
        self.there = False
        self.says.put_nowait({"type": "websocket.disconnect"})

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition():
                await asyncio.sleep(0.001)


SCOPE: Scope = {"type": "websocket", "headers": []}


async def echo(connection: Connection) -> None:
    """Answers with what it reads, in three parts; it breaks at "break"."""
    data = await connection.read(100, ignore_part)
    if b"break" in data:
        raise ValueError("secret")
    transport = connection.transport(stream=True, name="x")
    for number in range(3):
        event = StreamEvent(json.dumps({"part": number}))
        await transport.write([event], last=number == 2)


@contextlib.asynccontextmanager
async def served_by(client: Client) -> AsyncIterator[None]:
    client.says.put_nowait({"type": "websocket.connect"})
    task = asyncio.create_task(
        SocketSession({"echo": echo}, SCOPE, client.receive, client.send).serve()
    )
    await client.accepted.wait()
    yield
    client.leave()
    client.reads.set()
    await asyncio.wait_for(task, 5)


def test_a_slow_reader_delays_no_other() -> None:
    async def conversation() -> None:
        slow, quick = Client(), Client()
        async with served_by(slow), served_by(quick):
            slow.reads.clear()
            for client in (slow, quick):
                client.say(id="a", endpoint="echo", body={})
            await quick.until(lambda: len(quick.messages) == 4)
            assert slow.messages == []
            slow.reads.set()
            await slow.until(lambda: len(slow.messages) == 4)
        assert slow.messages == quick.messages

    asyncio.run(conversation())


def test_a_handler_that_breaks_affects_no_other() -> None:
    async def conversation() -> None:
        client = Client()
        async with served_by(client):
            client.say(id="a", endpoint="echo", body={"break": 1})
            client.say(id="b", endpoint="echo", body={})
            await client.until(lambda: len(client.messages) == 5)
        (broke,) = [message for message in client.messages if message["id"] == "a"]
        assert (broke["status"], broke["error"]["message"]) == (500, "internal error")
        assert client.messages[-1] == {"id": "b", "done": True}

    asyncio.run(conversation())


def test_a_client_that_disconnects_during_a_write() -> None:
    async def conversation() -> None:
        client = Client()
        async with served_by(client):
            client.reads.clear()
            client.say(id="a", endpoint="echo", body={})
            client.say(id="b", endpoint="echo", body={"break": 1})
            client.says.put_nowait({"type": "websocket.receive", "text": "nonsense"})
            await asyncio.sleep(0.01)
        assert client.messages == []

    asyncio.run(conversation())

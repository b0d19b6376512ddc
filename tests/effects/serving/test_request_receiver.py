"""Bodies come in within bounds, wherever they are prepared."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn
from unittest.mock import patch

import pytest
from pydantic_core import from_json
from starlette.requests import ClientDisconnect
from starlette.types import Message, Scope
from websockets.sync.client import connect

from minfer.effects.live.async_llm import AsyncLLM
from minfer.effects.live.errors import OverloadedError
from minfer.effects.serving.access.api_keys import ApiKey
from minfer.effects.serving.access.server_bounds import ServerBounds
from minfer.effects.serving.client_errors import ApiError
from minfer.effects.serving.openai.completions import ENDPOINT
from minfer.effects.serving.request_parsing import bodies
from minfer.effects.serving.request_parsing.limits import (
    BODY_MEMORY_BYTES,
    CLIENT_SHARE_DIVISOR,
    UNCOUNTED_BODY_BYTES,
    Limits,
)
from minfer.effects.serving.request_parsing.model_names import Models
from minfer.effects.serving.request_receiver import (
    LONG_BODY_BYTES,
    SLOW_SCHEMA,
    RequestReceiver,
)
from minfer.effects.serving.server_state import ServerState
from minfer.effects.serving.wire.envelope import RequestMessage
from minfer.effects.serving.wire.transport import Failure, Transport, Watcher
from minfer.effects.serving.wire.websocket import Channel
from minfer.effects.text.grammars import store as grammars
from minfer.records.messages import Submit
from minfer.sampling.structured import StructuredOutputs
from tests.effects.served import Serving, events, serving
from tests.effects.serving.raw_requests import NEIGHBOUR, SLOW, raw
from tests.effects.text.grammars.one_by_one import OneByOne

MODELS = Models(("m",), 0, 2048)


class Sent:
    """A connection on which one body comes after a while; its client may leave."""

    def __init__(self, data: bytes, after: float = 0.0, **headers: str) -> None:
        self.data = data
        self.after = after
        self.gone = asyncio.Event()
        raw = [(name.replace("_", "-"), text) for name, text in headers.items()]
        self.scope: Scope = {
            "client": ("10.0.0.7", 1),
            "headers": [(name.encode(), text.encode()) for name, text in raw],
        }

    chosen_id = ""

    def announced_size(self, max_bytes: int) -> int:
        return min(len(self.data), max_bytes)

    async def read(self, max_bytes: int, see: Watcher) -> bytes:
        assert len(self.data) <= max_bytes
        await asyncio.sleep(self.after)
        see(self.data)
        return self.data

    async def wait_for_disconnect(self) -> NoReturn:
        await self.gone.wait()
        raise ClientDisconnect

    async def refuse(self, failure: Failure) -> None:
        raise AssertionError(failure)

    def transport(
        self, *, stream: bool, name: str, ignored: Sequence[str] = ()
    ) -> Transport:
        raise AssertionError(stream, name, ignored)


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    with contextlib.closing(AsyncLLM(executor="dry", max_num_seqs=4)) as llm:
        yield llm


def body(**fields: Any) -> bytes:
    return json.dumps({"prompt": [5], "max_tokens": 3, **fields}).encode()


def taken(llm: AsyncLLM, sent: Sent, **bounds: Any) -> Any:
    """What becomes of a body."""

    async def whole() -> Any:
        server_bounds = ServerBounds(**bounds)
        limits = Limits.of(llm)
        receiver = RequestReceiver(
            ServerState(llm, limits, server_bounds), MODELS, limits, server_bounds
        )
        try:
            return await receiver.receive(ENDPOINT, sent)
        finally:
            receiver.close()

    return asyncio.run(whole())


@pytest.mark.parametrize("length", [1, LONG_BODY_BYTES + 1])
def test_a_client_is_known_by_its_address_or_its_own_name(
    llm: AsyncLLM, length: int
) -> None:
    data = body(cache_salt="x" * length)
    assert taken(llm, Sent(data)).request.urgency.client == "10.0.0.7"
    urgency = taken(llm, Sent(body(user="me", priority=3))).request.urgency
    assert (urgency.client, urgency.priority) == ("me", 3)


@pytest.mark.parametrize(
    ("policy", "key", "priority", "level"),
    [
        ("priority", None, -5, -5),
        ("fair", None, -5, 0),
        ("fair", None, 5, 5),
        ("fair", ApiKey("k", b""), -5, 0),
        ("fair", ApiKey("k", b""), 5, 5),
        ("fair", ApiKey("k", b"", priority=-2), 5, -2),
    ],
)
def test_under_fair_only_a_key_makes_more_urgent_than_others(
    policy: str, key: ApiKey | None, priority: int, level: int
) -> None:
    sent = Sent(body(priority=priority))
    if key is not None:
        sent.scope["minfer.key"] = key
    with contextlib.closing(AsyncLLM(executor="dry", scheduling_policy=policy)) as llm:
        assert taken(llm, sent).request.urgency.priority == level


def test_a_body_that_does_not_come_in_time(llm: AsyncLLM) -> None:
    with pytest.raises(ApiError, match=r"within 0\.05 s") as caught:
        taken(llm, Sent(body(), after=10), body_timeout=0.05)
    assert caught.value.status == 408


def test_a_disconnect_while_the_body_is_prepared(llm: AsyncLLM) -> None:
    sent = Sent(body(cache_salt="x" * LONG_BODY_BYTES))
    sent.gone.set()
    with pytest.raises(ClientDisconnect):
        taken(llm, sent, workers=1)


@pytest.mark.parametrize(
    ("field", "slow"),
    [
        ({"pattern": "^(?:a|b)$", "title": "é <b>"}, False),
        ({"pattern": "^(?=a)"}, True),
        ({"pattern": "(?!a)"}, True),
        ({"propertyNames": {}}, True),
        ({"oneOf": []}, True),
    ],
)
def test_what_may_be_slow_is_prepared_away_from_the_event_loop(
    field: dict[str, Any], slow: bool
) -> None:
    text = json.dumps(field)
    assert bool(SLOW_SCHEMA.search(text.encode())) == slow
    escaped = text
    for letter in "=!yF":
        escaped = escaped.replace(letter, f"\\u{ord(letter):04x}")
    assert json.loads(escaped) == field
    assert bool(SLOW_SCHEMA.search(escaped.encode())) == slow


class Slowly(OneByOne):
    """Compiles once it may."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.clients: list[str] = []

    def compile(self, constraint: StructuredOutputs) -> Any:
        self.clients.append(constraint.text)
        assert self.go.wait(60)
        return self


def constrained(name: str) -> Sent:
    return Sent(body(structured_outputs={"regex": name}))


def test_a_disconnect_removes_its_constraint_from_the_queue(llm: AsyncLLM) -> None:
    slowly = Slowly()
    store = grammars.Grammars(lambda: slowly)

    async def whole() -> None:
        server_bounds = ServerBounds()
        limits = Limits.of(llm)
        receiver = RequestReceiver(
            ServerState(llm, limits, server_bounds), MODELS, limits, server_bounds
        )
        share = grammars.MAX_WAITING // grammars.CLIENT_SHARE
        sent = [constrained(f"x{i}") for i in range(share + grammars.COMPILE_THREADS)]
        doing = [
            asyncio.ensure_future(receiver.receive(ENDPOINT, connection))
            for connection in sent
        ]
        async with asyncio.timeout(60):
            while len(slowly.clients) < grammars.COMPILE_THREADS or not store.is_full_for(
                "10.0.0.7"
            ):
                await asyncio.sleep(0.001)
        with pytest.raises(OverloadedError, match="constraints wait"):
            await receiver.receive(ENDPOINT, constrained("one more"))
        other_connection = constrained("other")
        other_connection.scope["client"] = ("10.0.0.8", 1)
        doing.append(asyncio.ensure_future(receiver.receive(ENDPOINT, other_connection)))
        for connection in sent:
            connection.gone.set()
        await asyncio.wait(doing[:-1])
        assert store.pending == grammars.COMPILE_THREADS + 1
        slowly.go.set()
        assert (await doing[-1]).request.prompts
        assert sorted(slowly.clients) == ["other", "x0", "x1"]
        for left in doing[:-1]:
            assert isinstance(left.exception(), ClientDisconnect)
        receiver.close()

    with patch.object(llm, "grammars", store):
        asyncio.run(whole())


def test_more_than_an_idle_server_can_take_is_refused() -> None:
    with contextlib.closing(AsyncLLM(executor="dry", max_waiting=2)) as llm:
        with pytest.raises(ApiError, match="waiting queue, which holds 2") as caught:
            taken(llm, Sent(body(n=3)))
        assert (caught.value.status, caught.value.param) == (400, "n")
        assert taken(llm, Sent(body(n=2))).request.params.n == 2


@pytest.fixture(scope="module")
def pooled(folder: str) -> Iterator[Serving]:
    bounds = ServerBounds(workers=2)
    with serving(folder, service={"bounds": bounds}, **SLOW) as server:
        yield server


@pytest.mark.long
def test_prepared_in_a_process_it_is_the_same_request(pooled: Serving) -> None:
    def submitted(**fields: Any) -> Any:
        before = len(pooled.turns)
        assert pooled.post("completions", **fields, max_tokens=2).status_code == 200
        pooled.idle()
        turns = pooled.turns[before:]
        return next(e.request for events, _ in turns for e in events if type(e) is Submit)

    text = "a b c " * LONG_BODY_BYTES
    assert pooled.llm.tokenizer is not None
    ids = pooled.llm.tokenizer.encode(text)
    large = submitted(prompt=text, seed=5)
    repeated = submitted(prompt=ids, seed=5)
    assert large.prompt == repeated.prompt == tuple(ids)
    assert large.keys == repeated.keys


LARGE: dict[str, dict[str, Any]] = {
    "a text": {"data": json.dumps({"prompt": "a" * 4_000_000}).encode()},
    "ids": {"data": json.dumps({"prompt": [7] * 1_000_000}).encode()},
    "parts": {
        "data": json.dumps(
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": ""}] * 120_000,
                    }
                ]
            }
        ).encode(),
        "path": "chat/completions",
    },
    "keys": {
        "data": json.dumps(
            {
                "messages": [{"role": "user", "content": "x"}],
                "chat_template_kwargs": {f"k{i}": 1 for i in range(200_000)},
            }
        ).encode(),
        "path": "chat/completions",
    },
}


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of all that is parsed in the server's own process."""
    sizes: list[int] = []

    def seen(data: bytes, **options: Any) -> Any:
        sizes.append(len(data))
        return from_json(data, **options)

    monkeypatch.setattr(bodies, "from_json", seen)
    return sizes


@pytest.mark.long
@pytest.mark.parametrize("raw_request", LARGE.values(), ids=LARGE)
def test_a_large_body_is_not_parsed_where_streams_are_served(
    pooled: Serving,
    quiet: list[str],
    raw_request: dict[str, Any],
    parsed: list[int],
) -> None:
    url = f"{pooled.url}/v1/completions"
    with pooled.http.stream("POST", url, json=NEIGHBOUR) as answer:
        stream = events(answer.iter_lines())
        texts = [next(stream)["choices"][0]["text"]]
        status, _ = raw(pooled, **raw_request)
        texts += [event["choices"][0]["text"] for event in stream]
    assert status == 400
    assert len(parsed) == 1  # the neighbour's
    assert parsed[0] <= LONG_BODY_BYTES
    assert "".join(texts) == "".join(quiet)


@pytest.mark.long
@pytest.mark.parametrize("raw_request", LARGE.values(), ids=LARGE)
def test_a_large_message_on_a_socket_is_not_parsed_there(
    pooled: Serving, quiet: list[str], raw_request: dict[str, Any], parsed: list[int]
) -> None:
    endpoint = raw_request.get("path", "completions").partition("/")[0]
    message = b'{"id": "a", "endpoint": "%s", "body": %s}'
    message_text = message % (endpoint.encode(), raw_request["data"])
    url = f"{pooled.url}/v1/completions"
    socket = url.replace("http", "ws").replace("completions", "stream")
    with (
        connect(socket, max_size=None) as link,
        pooled.http.stream("POST", url, json=NEIGHBOUR) as answer,
    ):
        stream = events(answer.iter_lines())
        texts = [next(stream)["choices"][0]["text"]]
        link.send(message_text.decode())
        record = json.loads(link.recv(timeout=20))
        texts += [event["choices"][0]["text"] for event in stream]
    assert (record["id"], record["status"]) == ("a", 400)
    assert len(parsed) == 1  # the neighbour's
    assert parsed[0] <= LONG_BODY_BYTES
    assert "".join(texts) == "".join(quiet)


def test_messages_of_a_client_are_counted_together(llm: AsyncLLM) -> None:
    """As bodies are: before anything of them is read."""
    message = RequestMessage(
        "a", "completions", body(cache_salt="x" * UNCOUNTED_BODY_BYTES)
    )

    async def whole() -> None:
        server_bounds = ServerBounds()
        limits = Limits.of(llm)
        receiver = RequestReceiver(
            ServerState(llm, limits, server_bounds), MODELS, limits, server_bounds
        )
        channel = Channel({"client": ("10.0.0.7", 1)}, no_reader, message)
        try:
            with (
                receiver._body_memory.reserve(
                    "10.0.0.7",
                    BODY_MEMORY_BYTES // CLIENT_SHARE_DIVISOR - UNCOUNTED_BODY_BYTES,
                ),
                pytest.raises(OverloadedError, match="too many large bodies"),
            ):
                await receiver.receive(ENDPOINT, channel)
            await receiver.receive(ENDPOINT, channel)
            assert channel.announced_size(0) == 0, "it is kept while it is answered"
        finally:
            receiver.close()

    asyncio.run(whole())


async def no_reader(message: Message) -> None:
    raise AssertionError(message)

"""Backends that do as they are told, and a router in front of them, in one event loop."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any

import httpx
from attrs import define, field, frozen

from minfer.effects.proxy.route_server import RouterServer
from minfer.effects.proxy.router_application import RouterApplication
from minfer.effects.proxy.router_options import RouterOptions
from minfer.effects.serving.access.api_keys import ApiKey, ApiKeys, digest
from minfer.effects.serving.processes.server import HttpOptions, http_config, listen_at

TEAMS = ApiKeys((ApiKey("team-a", digest(b"a")), ApiKey("team-b", digest(b"b"))))
EVENTS = b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"


@frozen
class ReceivedRequest:
    """A request, as a backend got it."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


Answer = Callable[[ReceivedRequest, asyncio.StreamWriter], Awaitable[None]]


@define(eq=False)
class Backend:
    """A server that answers every request as `answer` does, and health as told."""

    name: str
    answer: Answer = field()
    seen: list[ReceivedRequest] = field(factory=list)
    left: int = 0  # connections that ended while they were answered
    health: int = 200
    ready: int = 404
    models: Any = None  # its list of models
    url: str = ""
    server: asyncio.Server | None = None
    connections: set[asyncio.StreamWriter] = field(factory=set)

    @answer.default
    def _answers_with_its_name(self) -> Answer:
        async def answer(_: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
            write_json(writer, {"id": f"{self.name}-{len(self.seen)}", "by": self.name})

        return answer

    async def start(self, port: int = 0) -> None:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        host, port = self.server.sockets[0].getsockname()
        self.url = f"http://{host}:{port}"

    async def stop(self) -> None:
        if self.server is not None:
            self.server.close()
            for connection in self.connections:
                connection.transport.abort()

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.connections.add(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await self._handle(await _read(reader), reader, writer)
                await writer.drain()
        self.connections.discard(writer)
        writer.close()

    async def _handle(
        self,
        request: ReceivedRequest,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        if request.target in ("/health", "/ready"):
            status = self.health if request.target == "/health" else self.ready
            if not self.health:
                await reader.read()  # it does not answer
            write_json(writer, {}, status)
            return
        asked_by_router = "x-forwarded-proto" not in request.headers
        if request.target == "/v1/models" and (self.models or asked_by_router):
            write_json(writer, self.models or {"object": "list", "data": []})
            return
        self.seen.append(request)
        answering = asyncio.ensure_future(self.answer(request, writer))
        # The router sends no second request before the first is answered.
        disconnected = asyncio.ensure_future(reader.read(1))
        await asyncio.wait((answering, disconnected), return_when=asyncio.FIRST_COMPLETED)
        cut = answering.done() and isinstance(answering.exception(), ConnectionError)
        if cut or not answering.done():
            self.left += 1
            answering.cancel()
            raise ConnectionResetError
        disconnected.cancel()
        await asyncio.wait((disconnected,))
        answering.result()


async def _read(reader: asyncio.StreamReader) -> ReceivedRequest:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.strip().split("\r\n")
    method, target, _ = first.split(" ")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return ReceivedRequest(method, target, headers, body)


def write_json(
    writer: asyncio.StreamWriter, content: Any, status: int = 200, headers: bytes = b""
) -> None:
    """Write a response of JSON."""
    body = json.dumps(content).encode()
    head = f"HTTP/1.1 {status} So\r\ncontent-type: application/json\r\n"
    length = f"content-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + headers + length.encode() + body)


async def close_at_once(_: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
    """Close the connection without an answer."""
    writer.close()


def chunk(data: bytes) -> bytes:
    """A part of a body in chunks; without data, its end."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def begin_events(writer: asyncio.StreamWriter, first: bytes) -> None:
    """Write the head of a stream, and its first part."""
    writer.write(b"HTTP/1.1 200 OK\r\n" + EVENTS + b"\r\n" + chunk(first))


@define(eq=False)
class Routing:
    """A running router."""

    router: RouterApplication
    backends: list[Backend]
    http: httpx.AsyncClient
    port: int

    async def chat(self, *texts: str, **fields: Any) -> httpx.Response:
        """Send a conversation, of a user and an assistant by turns."""
        roles = ("user", "assistant")
        messages = [
            {"role": roles[i % 2], "content": text} for i, text in enumerate(texts)
        ]
        headers = fields.pop("headers", None)
        body = {"model": "m", "messages": messages, **fields}
        return await self.http.post("/v1/chat/completions", json=body, headers=headers)

    async def answered_by(self, *texts: str, **fields: Any) -> str:
        """The backend that answers a conversation."""
        name: str = (await self.chat(*texts, **fields)).json()["by"]
        return name

    async def health(self, name: str) -> None:
        """Ask a backend now how it is."""
        await self.router.watches[name].probe()


@contextlib.asynccontextmanager
async def routing(
    count: int = 2,
    *,
    down: int = 0,
    late_sources: Any = None,
    models: Any = None,
    names: Sequence[Sequence[str]] = (),
    **options: Any,
) -> AsyncIterator[Routing]:
    """`count` backends behind a router, the last `down` of which are stopped; each has
    the list `models`, or one of these `names`. `late_sources` makes their KV sources of
    their addresses.
    """
    backends = [Backend("abcdef"[i]) for i in range(count)]
    for backend in backends:
        backend.models = models
    for backend in backends:
        await backend.start()
    for backend, model_names in zip(backends, names, strict=False):
        backend.models = {
            "object": "list",
            "data": [{"id": name} for name in model_names],
        }
    for backend in backends[count - down :]:
        await backend.stop()
    urls = [backend.url for backend in backends]
    if late_sources is not None:
        options["kv_sources"] = late_sources(urls)
    settings = {"max_body": 2**25, **options}
    router = RouterApplication(RouterOptions(backends=urls, **settings))
    (listener,) = listen_at("127.0.0.1", 0)
    port = listener.getsockname()[1]
    config = http_config(router, HttpOptions(names=[]))
    server = RouterServer(config, router, 1.0)
    with listener:
        serving = asyncio.ensure_future(server._serve([listener]))
        try:
            while not server.started:
                await asyncio.sleep(0.001)
            base = f"http://127.0.0.1:{port}"
            # Spares reading certificates.
            async with httpx.AsyncClient(base_url=base, timeout=10, verify=False) as http:  # noqa: S501
                yield Routing(router, backends, http, port)
        finally:
            server.should_exit = True
            await serving
            for backend in backends:
                await backend.stop()


def run(case: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Decorates a test's coroutine function: run it now, in an event loop."""
    asyncio.run(case())

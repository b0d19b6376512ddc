"""A server that answers as it is told to: byte for byte, late, in part or never."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from attrs import define, field

from minfer.effects.runs.load.load_client import LoadPlan
from minfer.effects.runs.load.load_prompts import RandomPrompts

Step = bytes | float  # what to send, or how many seconds to wait
CLOSE: Final = -1.0  # the connection, at this step
NEVER: Final = 3600.0
MODELS: Final = b'{"data":[{"id":"one","max_model_len":512},{"id":"two"}]}'
USAGE: Final = {"prompt_tokens": 7, "completion_tokens": 4}


def event(data: Any) -> bytes:
    text = data if isinstance(data, str) else json.dumps(data)
    return f"data: {text}\n\n".encode()


def token(text: str, end: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": end}
    return event({"choices": [choice], **more})


def usage(**reported: int) -> bytes:
    return event({"choices": [], "usage": {**USAGE, **reported}})


DONE: Final = event("[DONE]")
WHOLE: Final = [token("a"), token("b"), token("c"), token("d", "length"), usage(), DONE]


def stream(*parts: Step, ended: bool = True) -> list[Step]:
    """An answer in chunks, each part in one of its own."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    steps: list[Step] = [head + b"transfer-encoding: chunked\r\n\r\n"]
    for part in parts:
        if isinstance(part, bytes):
            steps.append(b"%x\r\n%s\r\n" % (len(part), part))
        else:
            steps.append(part)
    return [*steps, b"0\r\n\r\n" if ended else CLOSE]


def plain(status: int, body: bytes, *more: bytes) -> list[Step]:
    lines = [b"HTTP/1.1 %d Said" % status, b"content-length: %d" % len(body), *more]
    return [b"\r\n".join([*lines, b"content-type: application/json", b"", b""]) + body]


@define
class Stub:
    """A running server; connections get `answers` in turn, the last again and again."""

    answers: list[list[Step]]
    models: list[Step]
    url: str = ""
    requested: list[bytes] = field(factory=list)  # bodies of requests
    heads: list[bytes] = field(factory=list)
    connections: int = 0

    async def connected(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.connections += 1
        gone = (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError)
        with contextlib.suppress(*gone):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                _, _, rest = head.partition(b"Content-Length: ")
                body = await reader.readexactly(int(rest.partition(b"\r\n")[0] or 0))
                self.heads.append(head)
                if not await self._answer(head, body, writer):
                    break
        writer.close()

    async def _answer(
        self, head: bytes, body: bytes, writer: asyncio.StreamWriter
    ) -> bool:
        """Answer; whether the connection goes on."""
        steps = self.models
        if head.startswith(b"POST"):
            turn = min(len(self.requested), len(self.answers) - 1)
            self.requested.append(body)
            steps = self.answers[turn]
        for step in steps:
            if isinstance(step, bytes):
                writer.write(step)
            elif step == CLOSE:
                return False
            else:
                await asyncio.sleep(step)
        return True


@contextlib.contextmanager
def stub(
    *answers: Sequence[Step], models: Sequence[Step] | None = None
) -> Iterator[Stub]:
    """A server that runs meanwhile."""
    made = Stub(
        [list(one) for one in answers] or [stream(*WHOLE)],
        list(models or plain(200, MODELS)),
    )
    ready = threading.Event()
    reported: list[Callable[[], object]] = []

    async def serve() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        reported.append(lambda: loop.call_soon_threadsafe(stop.set))
        server = await asyncio.start_server(made.connected, "127.0.0.1", 0)
        made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready.set()
        await stop.wait()
        server.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(10)
        yield made
    finally:
        reported[0]()
        thread.join()


def load_on(url: str, count: int = 1, **more: Any) -> LoadPlan:
    """A small load."""
    prompts = more.pop("prompts", RandomPrompts(4, 4))
    return LoadPlan(f"{url}/v1/completions", "one", prompts, count, **more)

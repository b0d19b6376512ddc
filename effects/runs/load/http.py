"""HTTP/1.1 as a load generator needs it: one request at a time on a connection that is
kept.

A library's client costs more than an answer does. With httpx, 64 streams that bring 4,000
events a second take 40% of a core (107 us an event, as every layer wraps every piece),
with this 14% (35 us): a server that writes 60,000 tokens a second would keep more than
six processes busy, and their measurements would be of themselves. Here the body of a
read goes, undone of its chunks, to whoever parses it, which is all that is needed: bodies
are of known length or chunked or end with the connection; there are no redirects,
cookies, encodings or proxies.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Final, Protocol
from urllib.parse import urlsplit

from attrs import define, frozen

from minfer.effects.runs.load.record import LoadError

_READ: Final = 2**18  # bytes, at most, of one read
_HEX: Final = 16  # digits of a chunk's size, at most
_FINAL: Final = 200  # lower statuses announce another


class HttpError(Exception):
    """An exchange that went wrong: `kind` is the same for all that failed alike."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Answer(Protocol):
    """What takes an answer as it comes."""

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """The head has come."""

    def body(self, part: bytes, now: float) -> None:
        """A part of the body has come, at a monotonic time."""


@frozen
class Address:
    """Where a server is."""

    host: str
    port: int
    tls: bool
    path: str  # before /v1, without a slash at its end

    @property
    def url(self) -> str:
        """As one writes it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.tls else ''}://{host}:{self.port}{self.path}"

    def head(self, method: str, path: str, key: str, length: int) -> bytes:
        """The head of a request."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"{method} {self.path}{path} HTTP/1.1",
            f"Host: {host}:{self.port}",
            "Accept: */*",
            f"Content-Length: {length}",
        ]
        lines += ["Content-Type: application/json"] if length else []
        lines += [f"Authorization: Bearer {key}"] if key else []
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


def read_address(url: str) -> Address:
    """The address of a base URL, with or without its /v1. Raises LoadError."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError as error:
        raise LoadError(f"--base-url {url!r}: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise LoadError(
            f"--base-url {url!r} is no address of a server; it is as in "
            "http://127.0.0.1:8000"
        )
    tls = parts.scheme == "https"
    path = parts.path.rstrip("/").removesuffix("/v1")
    return Address(parts.hostname, port or (443 if tls else 80), tls, path)


@define
class Chunked:
    """Undoes the chunks of a body."""

    ended: bool = False
    _rest: bytes = b""  # of a chunk's head, or of what follows a chunk
    _left: int = 0  # bytes of the chunk that have not come
    _last: bool = False  # what comes now are trailers

    def feed(self, part: bytes) -> bytes:
        """What is in the chunks. Raises HttpError."""
        data, out, at = self._rest + part, list[bytes](), 0
        while True:
            if self._left:
                piece = data[at : at + self._left]
                out.append(piece)
                at += len(piece)
                self._left -= len(piece)
            stop = data.find(b"\r\n", at)
            if self._left or stop < 0 or self.ended:
                break
            line, at = data[at:stop], stop + 2
            if self._last:
                self.ended = not line
            elif line:  # and not what follows a chunk
                self._left = _size(line)
                self._last = not self._left
        self._rest = data[at:]
        if len(self._rest) > _READ:
            raise HttpError("malformed", "a chunk of the answer has no size")
        return out[0] if len(out) == 1 else b"".join(out)


def _size(line: bytes) -> int:
    """The size of a chunk."""
    digits = line.partition(b";")[0].strip()
    try:
        return int(digits[:_HEX], 16)
    except ValueError:
        shown = digits[:20].decode("latin-1")
        raise HttpError("malformed", f"{shown!r} is no size of a chunk") from None


class Connection:
    """A connection on which one request is answered after the other."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._reader = reader
        self._writer = writer
        self.used = False  # a request was answered on it
        self.reusable = True

    @classmethod
    async def open(cls, address: Address) -> "Connection":
        """Connect. Raises HttpError."""
        try:
            reader, writer = await asyncio.open_connection(
                address.host, address.port, ssl=address.tls or None, limit=_READ
            )
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or str(error)
            if isinstance(error, ConnectionRefusedError):
                why = "connection refused"
            raise HttpError("not connected", why) from None
        return cls(reader, writer)

    def close(self) -> None:
        """Close it, without waiting."""
        self._writer.close()

    async def exchange(self, request: bytes, answer: Answer) -> None:
        """Send a request, and pass its answer on. Raises HttpError."""
        try:
            self._writer.write(request)
            await self._writer.drain()
            await self._answer(answer)
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            said = getattr(error, "strerror", None)  # of the system
            why = said or "the server closed the connection"
            raise HttpError("cut off", f"{why} before its answer had ended") from None
        self.used = True

    async def _answer(self, answer: Answer) -> None:
        status, version, headers = await self._head()
        answer.begin(status, headers)
        length = headers.get("content-length")
        closes = "close" in headers.get("connection", "").lower()
        self.reusable = version == "HTTP/1.1" and not closes
        if "chunked" in headers.get("transfer-encoding", "").lower():
            await self._chunks(answer)
        elif length is not None:
            if not length.isdecimal():
                raise HttpError("malformed", "the answer's length is no number")
            await self._counted(answer, int(length))
        else:
            self.reusable = False
            while part := await self._reader.read(_READ):
                answer.body(part, time.monotonic())

    async def _head(self) -> tuple[int, str, dict[str, str]]:
        """Status, version and headers; heads that only announce another are left out."""
        status = 0
        while status < _FINAL:
            try:
                head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                first, *lines = head.rstrip().split("\r\n")
                version, code = first.split(" ")[:2]
                status = int(code)
            except (asyncio.LimitOverrunError, ValueError):
                raise HttpError("malformed", "what the server sent is not HTTP") from None
        pairs = (line.partition(":") for line in lines)
        return status, version, {k.strip().lower(): v.strip() for k, _, v in pairs}

    async def _chunks(self, answer: Answer) -> None:
        chunked = Chunked()
        while not chunked.ended:
            part = await self._reader.read(_READ)
            now = time.monotonic()
            if not part:
                raise asyncio.IncompleteReadError(b"", None)
            answer.body(chunked.feed(part), now)

    async def _counted(self, answer: Answer, left: int) -> None:
        while left > 0:
            part = await self._reader.read(min(left, _READ))
            if not part:
                raise asyncio.IncompleteReadError(b"", left)
            left -= len(part)
            answer.body(part, time.monotonic())

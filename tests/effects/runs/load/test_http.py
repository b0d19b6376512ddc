"""The wire: addresses, chunks in any pieces, and what is not HTTP."""

import asyncio
from collections.abc import Mapping

import pytest
from attrs import define

from minfer.effects.runs.load import http
from minfer.effects.runs.load.http import (
    Address,
    Chunked,
    Connection,
    HttpError,
    read_address,
)
from minfer.effects.runs.load.record import LoadError
from tests.effects.runs.load.stub import CLOSE, Step, plain, stream, stub


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://h:80/v1", Address("h", 80, False, "")),
        ("http://h:8000", Address("h", 8000, False, "")),
        ("h:8000/", Address("h", 8000, False, "")),
        ("https://h/models/v1/", Address("h", 443, True, "/models")),
        ("http://[::1]:9", Address("::1", 9, False, "")),
    ],
)
def test_an_address_is_read(url: str, address: Address) -> None:
    assert read_address(url) == address
    assert read_address(address.url) == address


@pytest.mark.parametrize("url", ["", "ftp://h", "http://", "http://h:port", "http://h?a"])
def test_what_is_no_address_is_named(url: str) -> None:
    with pytest.raises(LoadError, match="--base-url"):
        read_address(url)


def test_a_head_names_host_key_and_length() -> None:
    head = Address("::1", 9, False, "/x").head("POST", "/v1/y", "secret", 5).decode()
    first, *lines = head.removesuffix("\r\n\r\n").split("\r\n")
    assert first == "POST /x/v1/y HTTP/1.1"
    wanted = {"Host: [::1]:9", "Content-Length: 5", "Authorization: Bearer secret"}
    assert wanted <= set(lines)
    assert (
        "Authorization" not in Address("h", 9, False, "").head("GET", "/", "", 0).decode()
    )


@pytest.mark.parametrize("size", range(1, 9))
def test_chunks_are_undone_however_they_are_cut(size: int) -> None:
    wire = b"3\r\nabc\r\nA;name=value\r\n0123\r\n6789\r\n0\r\nTrailer: x\r\n\r\n"
    chunked, out = Chunked(), b""
    for at in range(0, len(wire), size):
        assert not chunked.ended
        out += chunked.feed(wire[at : at + size])
    assert chunked.ended
    assert out == b"abc0123\r\n6789"


def test_what_is_no_chunk_is_refused() -> None:
    with pytest.raises(HttpError, match="'hello' is no size of a chunk"):
        Chunked().feed(b"hello\r\n")
    with pytest.raises(HttpError, match="has no size"):
        Chunked().feed(b"1" * (http._READ + 1))


@define
class Kept:
    """An answer as it came."""

    status: int = 0
    text: bytes = b""

    def begin(self, status: int, headers: Mapping[str, str]) -> None:  # noqa: ARG002 - the protocol's
        self.status = status

    def body(self, part: bytes, now: float) -> None:
        assert now > 0
        self.text += part


def exchanged(*steps: Step) -> tuple[Kept, Connection]:
    """What comes of one exchange."""

    async def run(url: str) -> tuple[Kept, Connection]:
        kept, address = Kept(), read_address(url)
        connection = await Connection.open(address)
        try:
            await connection.exchange(address.head("POST", "/", "", 0), kept)
        finally:
            connection.close()
        return kept, connection

    with stub(steps) as server:
        return asyncio.run(run(server.url))


def test_bodies_end_by_length_by_chunks_or_with_the_connection() -> None:
    kept, connection = exchanged(*plain(200, b"hello"))
    assert (kept.status, kept.text, connection.reusable) == (200, b"hello", True)
    kept, connection = exchanged(*stream(b"ab", b"c"))
    assert (kept.text, connection.reusable) == (b"abc", True)
    kept, connection = exchanged(*plain(404, b"x", b"Connection: close"))
    assert (kept.status, kept.text, connection.reusable) == (404, b"x", False)
    kept, connection = exchanged(b"HTTP/1.1 200 OK\r\n\r\nuntil", b" the end", CLOSE)
    assert (kept.text, connection.reusable) == (b"until the end", False)


def test_an_announcement_is_passed_over() -> None:
    announced = b"HTTP/1.1 100 Continue\r\n\r\n"
    kept, _ = exchanged(announced + plain(201, b"x")[0])  # type: ignore[operator]  # it is bytes
    assert (kept.status, kept.text) == (201, b"x")


@pytest.mark.parametrize(
    ("steps", "kind", "message"),
    [
        ([b"SSH-2.0-x\r\n\r\n"], "malformed", "not HTTP"),
        ([b"HTTP/1.1 many OK\r\n\r\n"], "malformed", "not HTTP"),
        ([b"x" * 2**20], "malformed", "not HTTP"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n"], "malformed", "length"),
        ([CLOSE], "cut off", "before its answer had ended"),
        (
            [b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort", CLOSE],
            "cut off",
            "before",
        ),
        (stream(b"abc", ended=False), "cut off", "before"),
    ],
)
def test_what_goes_wrong_is_told(steps: list[Step], kind: str, message: str) -> None:
    with pytest.raises(HttpError, match=message) as caught:
        exchanged(*steps)
    assert caught.value.kind == kind


def test_nobody_there() -> None:
    with stub() as server:
        gone = read_address(server.url)
    with pytest.raises(HttpError, match="connection refused") as caught:
        asyncio.run(Connection.open(gone))
    assert caught.value.kind == "not connected"

"""Frames between a server and its workers: a length, then so many bytes of msgpack.

What is in them has a schema (`Ask`, `Reply`, both attrs records), so that nothing that
comes through a socket can become any other object.
"""

import socket
from typing import Final

import msgspec
from attrs import frozen

from minfer.effects.serving.preparing.task import Prepared

HEADER: Final = 4  # bytes of a frame's length
LARGEST: Final = 2**31


@frozen(kw_only=True)
class Ask:
    """A body, and where it was posted."""

    path: str  # of the endpoint or question
    data: bytes


@frozen(kw_only=True)
class Refusal:
    """What a client is told instead: the parts of an ApiError."""

    message: str
    param: str | None
    code: str | None
    status: int


@frozen(kw_only=True)
class Reply:
    """What became of a body; `last` if the worker ends now, having grown."""

    prepared: Prepared | None = None
    answer: str | None = None  # to a question
    refusal: Refusal | None = None
    last: bool = False


_asks: Final = msgspec.msgpack.Decoder(Ask)
_replies: Final = msgspec.msgpack.Decoder(Reply)


def packed(message: Ask | Reply) -> bytes:
    """A frame."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(HEADER, "little") + data


def read_ask(data: bytes) -> Ask:
    """What the bytes of a frame ask. Raises msgspec.DecodeError."""
    return _asks.decode(data)


def read_reply(data: bytes) -> Reply:
    """What the bytes of a frame reply. Raises msgspec.DecodeError."""
    return _replies.decode(data)


def received(link: socket.socket) -> bytes | None:
    """The next frame's bytes, waiting for them; None: the other side has gone."""
    head = _exactly(link, HEADER)
    return None if head is None else _exactly(link, int.from_bytes(head, "little"))


def _exactly(link: socket.socket, count: int) -> bytes | None:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        if not (got := link.recv_into(view)):
            return None
        view = view[got:]
    return bytes(data)

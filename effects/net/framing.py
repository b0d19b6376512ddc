"""Messages on a blocking socket: msgpack, each behind its length."""

import socket
import struct
import time
from typing import Final, TypeAlias, TypeVar

import msgspec

LARGEST: Final = 1 << 20  # bytes of a message
_LENGTH: Final = struct.Struct("<I")
_encode: Final = msgspec.msgpack.Encoder().encode
Socket: TypeAlias = socket.socket
Message = TypeVar("Message")


class PeerError(Exception):
    """The other side is not one that this one can work with, or it has gone."""


def framed(message: msgspec.Struct) -> bytes:
    """A message with its length before it."""
    data = _encode(message)
    return _LENGTH.pack(len(data)) + data


def read_exactly(sock: Socket, into: memoryview, end: float | None = None) -> None:
    """Fill `into` from a socket, until a moment of the monotonic clock, if there is one.
    Raises PeerError at the connection's end, and OSError.
    """
    while into:
        if end is not None:
            sock.settimeout(max(0.001, end - time.monotonic()))
        count = sock.recv_into(into)
        if not count:
            raise PeerError("the connection has ended")
        into = into[count:]


def read_message(
    sock: Socket,
    decoder: "msgspec.msgpack.Decoder[Message]",
    *,
    first: bytes = b"",
    end: float | None = None,
    largest: int = LARGEST,
) -> Message:
    """Read a message, whose `first` bytes were read before; see `read_exactly`. Raises
    PeerError, for one that is not as the decoder wants it, too, and OSError.
    """
    head = bytearray(_LENGTH.size)
    head[: len(first)] = first
    read_exactly(sock, memoryview(head)[len(first) :], end)
    (length,) = _LENGTH.unpack(head)
    if length > largest:
        raise PeerError(f"a message of {length} bytes; the largest has {largest}")
    data = bytearray(length)
    read_exactly(sock, memoryview(data), end)
    try:
        return decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise PeerError(f"a message that cannot be read: {error}") from None

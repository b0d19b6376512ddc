"""Messages on an ordered socket, each behind its length:

    | length: 4 bytes, little-endian | message: so many bytes |

A socket keeps their order, and none is lost before its end: whatever goes wrong, the
connection is over. Each use has a largest message; a longer one is refused before its
bytes come.
"""

import socket
import struct
import time
from typing import Final, TypeAlias, TypeVar

import msgspec

_LENGTH: Final = struct.Struct("<I")
_encode: Final = msgspec.msgpack.Encoder().encode
Socket: TypeAlias = socket.socket
Message = TypeVar("Message")
# Errors of msgspec for invalid bytes; the last two are not its own.
UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class PeerError(Exception):
    """The other side is not one that this one can work with, or it has gone."""


class EndedError(PeerError):
    """The connection has ended."""


def frame(message: bytes) -> bytes:
    """Returns a message with its length before it."""
    return _LENGTH.pack(len(message)) + message


def framed(message: msgspec.Struct) -> bytes:
    """Returns a record as msgpack, with its length before it."""
    return frame(_encode(message))


class FrameReader:
    """Finds messages in incoming bytes."""

    def __init__(self, largest: int) -> None:
        """`largest`: bytes of a message."""
        self._largest = largest
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes; returns the messages that are complete now. Raises PeerError."""
        self._buffer += data
        found = []
        at = 0
        while len(self._buffer) - at >= _LENGTH.size:
            end = at + _LENGTH.size + _length(self._buffer, at, self._largest)
            if len(self._buffer) < end:
                break
            with memoryview(self._buffer) as view:  # a slice of it copies nothing
                found.append(view[at + _LENGTH.size : end].tobytes())
            at = end
        del self._buffer[:at]
        return found


def read_exactly(sock: Socket, into: memoryview, end: float | None = None) -> None:
    """Fill `into` from a socket, until a moment of the monotonic clock, if there is one.
    Raises EndedError and OSError.
    """
    while into:
        if end is not None:
            sock.settimeout(max(0.001, end - time.monotonic()))
        count = sock.recv_into(into)
        if not count:
            raise EndedError("the connection has ended")
        into = into[count:]


def read_frame(
    sock: Socket, largest: int, *, first: bytes = b"", end: float | None = None
) -> bytearray:
    """Read a message of at most `largest` bytes, whose `first` bytes were read before;
    see `read_exactly`. Raises PeerError and OSError.
    """
    head = bytearray(_LENGTH.size)
    head[: len(first)] = first
    read_exactly(sock, memoryview(head)[len(first) :], end)
    data = bytearray(_length(head, 0, largest))
    read_exactly(sock, memoryview(data), end)
    return data


def read_message(
    sock: Socket,
    decoder: "msgspec.msgpack.Decoder[Message]",
    largest: int,
    *,
    first: bytes = b"",
    end: float | None = None,
) -> Message:
    """Read a record; see `read_frame`. Raises PeerError, for one that is not as the
    decoder wants it, too, and OSError.
    """
    data = read_frame(sock, largest, first=first, end=end)
    try:
        return decoder.decode(data)
    except UNREADABLE as error:
        raise PeerError(f"a message that cannot be read: {error}") from None


def _length(data: bytearray, at: int, largest: int) -> int:
    (length,) = _LENGTH.unpack_from(data, at)
    if length > largest:
        raise PeerError(f"a message of {length} bytes; the largest has {largest}")
    return int(length)

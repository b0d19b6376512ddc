"""Messages on an ordered socket, each behind its length:

    | length: 4 bytes, little-endian | message: `length` bytes |

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
    """The other side is not compatible, or the connection to it has ended."""


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

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: of a message."""
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes; returns the messages that are complete now. Raises PeerError."""
        self._buffer += data
        messages = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            end = start + _LENGTH.size + _length(self._buffer, start, self._max_bytes)
            if len(self._buffer) < end:
                break
            with memoryview(self._buffer) as view:  # a slice of it copies nothing
                messages.append(view[start + _LENGTH.size : end].tobytes())
            start = end
        del self._buffer[:start]
        return messages


def read_exactly(sock: Socket, buffer: memoryview, deadline: float | None = None) -> None:
    """Fill `buffer` from a socket, until a `deadline` of the monotonic clock, if there is
    one. Raises EndedError and OSError.
    """
    while buffer:
        if deadline is not None:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
        count = sock.recv_into(buffer)
        if not count:
            raise EndedError("the connection has ended")
        buffer = buffer[count:]


def read_frame(
    sock: Socket, max_bytes: int, *, first: bytes = b"", deadline: float | None = None
) -> bytearray:
    """Read a message of at most `max_bytes` bytes, whose `first` bytes were read before;
    see `read_exactly`. Raises PeerError and OSError.
    """
    header = bytearray(_LENGTH.size)
    header[: len(first)] = first
    read_exactly(sock, memoryview(header)[len(first) :], deadline)
    data = bytearray(_length(header, 0, max_bytes))
    read_exactly(sock, memoryview(data), deadline)
    return data


def read_message(
    sock: Socket,
    decoder: "msgspec.msgpack.Decoder[Message]",
    max_bytes: int,
    *,
    first: bytes = b"",
    deadline: float | None = None,
) -> Message:
    """Read a record; see `read_frame`. Raises PeerError, also for a message that the
    decoder cannot read, and OSError.
    """
    data = read_frame(sock, max_bytes, first=first, deadline=deadline)
    try:
        return decoder.decode(data)
    except UNREADABLE as error:
        raise PeerError(f"a message that cannot be read: {error}") from None


def _length(data: bytearray, start: int, max_bytes: int) -> int:
    (length,) = _LENGTH.unpack_from(data, start)
    if length > max_bytes:
        raise PeerError(f"a message of {length} bytes; the largest has {max_bytes}")
    return int(length)

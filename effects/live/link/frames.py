"""Messages on a stream of bytes: a length, a number, and the message itself.

    | length: 4 bytes | number: 8 bytes | message: length bytes |   little endian

Numbers count a link's frames in one direction, from 0. One that does not follow the last
says that a frame was lost, doubled or late: the link is of no use any more.
"""

import struct
from typing import Final

from minfer.effects.live.link.messages import LinkError

_HEAD: Final = struct.Struct("<IQ")
LARGEST: Final = 2**30  # bytes of a message; whoever announces more is out of step


class FrameWriter:
    """Numbers the messages that go out."""

    def __init__(self) -> None:
        self._next = 0

    def frame(self, message: bytes) -> bytes:
        """A message with its head."""
        head = _HEAD.pack(len(message), self._next)
        self._next += 1
        return head + message


class FrameReader:
    """Finds messages in bytes as they come."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._next = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes; returns the messages that are whole by now. Raises LinkError."""
        self._buffer += data
        found = []
        at = 0
        while len(self._buffer) - at >= _HEAD.size:
            length, number = _HEAD.unpack_from(self._buffer, at)
            if number != self._next:
                raise LinkError(f"frame {number} came instead of frame {self._next}")
            if length > LARGEST:
                raise LinkError(f"a frame of {length} bytes; the largest has {LARGEST}")
            end = at + _HEAD.size + length
            if len(self._buffer) < end:
                break
            self._next += 1
            with memoryview(self._buffer) as view:  # a slice of it copies nothing
                found.append(view[at + _HEAD.size : end].tobytes())
            at = end
        del self._buffer[:at]
        return found

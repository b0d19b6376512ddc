"""Messages on a stream of bytes: a length, a number, and the message itself.

    | length: 4 bytes | number: 8 bytes | message: length bytes |   little endian

Numbers count a link's frames in one direction, from 0. A number that does not follow the
last one means that a frame was lost, doubled or late: the link is closed.
"""

import struct
from typing import Final

from minfer.effects.net.framing import PeerError

_HEAD: Final = struct.Struct("<IQ")
LARGEST: Final = 2**30  # bytes of a message; a larger length means a broken stream


class FrameWriter:
    """Numbers the outgoing messages."""

    def __init__(self) -> None:
        self._next = 0

    def frame(self, message: bytes) -> bytes:
        """Returns a message with its head."""
        head = _HEAD.pack(len(message), self._next)
        self._next += 1
        return head + message


class FrameReader:
    """Finds messages in incoming bytes."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._next = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes; returns the messages that are complete now. Raises PeerError."""
        self._buffer += data
        found = []
        at = 0
        while len(self._buffer) - at >= _HEAD.size:
            length, number = _HEAD.unpack_from(self._buffer, at)
            if number != self._next:
                raise PeerError(f"frame {number} came instead of frame {self._next}")
            if length > LARGEST:
                raise PeerError(f"a frame of {length} bytes; the largest has {LARGEST}")
            end = at + _HEAD.size + length
            if len(self._buffer) < end:
                break
            self._next += 1
            with memoryview(self._buffer) as view:  # a slice of it copies nothing
                found.append(view[at + _HEAD.size : end].tobytes())
            at = end
        del self._buffer[:at]
        return found

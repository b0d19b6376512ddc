"""Log-probabilities of a prompt's tokens, as they travel: chunk by chunk, as bytes.

Theory. A prompt is long where its output is short, and nobody but the client looks at
what is said of it. So a chunk's log-probabilities stay one piece of bytes from the device
to whoever asked, and a step costs the engine nothing for each of its tokens:

    part    u32 first, count, width; then the ranks and the likeliest ids, i32
            [count, width]; then log-probabilities, f32 [count, width]; little-endian

A token's line holds its own rank, then the ids of the `width` - 1 likeliest; and their
log-probabilities in the same order, its own first. `first` is the index in the prompt of
the part's first token. A prompt may be computed more than once (who is sent back in line
begins anew), so parts may overlap; but none is missing. What comes of one sample in a
turn are its parts, one after the other.
"""

import struct
from collections.abc import Iterator
from typing import Final

from attrs import frozen

from minfer.plan import TokenLogprobs

_HEAD: Final = struct.Struct("<3I")
_WORD: Final = 4  # bytes


@frozen
class PromptPart:
    """Log-probabilities of some tokens in a row of a prompt."""

    first: int  # the index of the first of them
    count: int
    width: int  # entries of each
    ids: bytes
    logprobs: bytes

    def line(self, at: int) -> TokenLogprobs:
        """What is said of the token `at` places after the first."""
        begin = at * self.width * _WORD
        end = begin + self.width * _WORD
        rank, *likeliest = struct.unpack(f"<{self.width}i", self.ids[begin:end])
        own, *others = struct.unpack(f"<{self.width}f", self.logprobs[begin:end])
        return TokenLogprobs(own, rank, tuple(likeliest), tuple(others))


def packed(part: PromptPart) -> bytes:
    """A part as it travels."""
    head = _HEAD.pack(part.first, part.count, part.width)
    return b"".join((head, part.ids, part.logprobs))


def parts_of(data: bytes) -> Iterator[PromptPart]:
    """The parts that were packed as `data`. Raises ValueError for what is none."""
    at = 0
    while at < len(data):
        if len(data) - at < _HEAD.size:
            raise ValueError("log-probabilities of a prompt end in the middle")
        first, count, width = _HEAD.unpack_from(data, at)
        size = count * width * _WORD
        ids = at + _HEAD.size
        at = ids + 2 * size
        if at > len(data):
            raise ValueError("log-probabilities of a prompt end in the middle")
        both = data[ids : ids + size], data[ids + size : at]
        yield PromptPart(first, count, width, *both)

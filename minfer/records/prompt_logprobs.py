"""Log-probabilities of a prompt's tokens, packed chunk by chunk as bytes.

Theory. A prompt is often longer than the output, and only the client reads the
log-probabilities of its tokens. So those of a chunk stay one bytes object from the device
to the client, and cost the engine nothing per token:

    part    u32 first, count, width; then the ranks and the likeliest ids, i32
            [count, width]; then log-probabilities, f32 [count, width]; little-endian

A token's line holds its own rank, then the ids of the `width` - 1 likeliest; and their
log-probabilities in the same order, its own first. `first` is the index in the prompt of
the part's first token. A prompt may be computed more than once (after a preemption), so
parts may overlap; but none is missing. The results of one sample in a turn are its parts,
concatenated.
"""

import struct
from collections.abc import Iterator
from typing import Final

from attrs import frozen

from minfer.records.plan import TokenLogprobs

_HEAD: Final = struct.Struct("<3I")
_WORD: Final = 4  # bytes


@frozen
class PromptPart:
    """Log-probabilities of consecutive tokens of a prompt."""

    first: int  # the index of the first of them
    count: int
    width: int  # entries of each
    ids: bytes
    logprobs: bytes

    def line(self, at: int) -> TokenLogprobs:
        """The log-probabilities of the token `at` places after the first."""
        begin = at * self.width * _WORD
        end = begin + self.width * _WORD
        rank, *likeliest = struct.unpack(f"<{self.width}i", self.ids[begin:end])
        own, *others = struct.unpack(f"<{self.width}f", self.logprobs[begin:end])
        return TokenLogprobs(own, rank, tuple(likeliest), tuple(others))


def packed(part: PromptPart) -> bytes:
    """The bytes of a part."""
    head = _HEAD.pack(part.first, part.count, part.width)
    return b"".join((head, part.ids, part.logprobs))


def parts_of(data: bytes) -> Iterator[PromptPart]:
    """The parts packed in `data`. Raises ValueError if it is cut off."""
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

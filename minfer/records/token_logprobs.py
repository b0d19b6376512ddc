"""Log-probabilities of tokens, of prompts and of outputs.

Theory. `TokenLogprobs` is the one record of them, from the executor's results to the
outputs, where users read it by token id. Those of output tokens are a column of results.
A prompt is often longer than the output, and only the client reads the log-probabilities
of its tokens. So those of a chunk stay one bytes object from the device to the client,
and cost the engine nothing per token:

    part    u32 first, count, width; then a line for each of `count` tokens; little-endian
    line    i32 rank, and ids of the `width` - 1 likeliest tokens; f32 log-probabilities,
            of the token itself and of these

`first` is the index in the prompt of the part's first token. A prompt may be computed
more than once (after a preemption), so parts may overlap; but none is missing. The
results of one sample in a turn are its parts, concatenated.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import Final

from attrs import frozen

_HEAD: Final = struct.Struct("<3I")
WORD_BYTES: Final = 4


@frozen
class TokenLogprobs:
    """A token, its log-probability, and the likeliest tokens at its place."""

    token: int
    logprob: float  # natural
    rank: int  # 1: the likeliest token
    likeliest: tuple[int, ...] = ()  # token ids, the likeliest first
    logprobs: tuple[float, ...] = ()  # of `likeliest`

    @classmethod
    def read(
        cls, token: int, data: bytes, ids_at: int, logprobs_at: int, width: int
    ) -> "TokenLogprobs":
        """The record of a token, whose line has its halves at these bytes of `data`."""
        rank, *ids = struct.unpack_from(f"<{width}i", data, ids_at)
        own_logprob, *likeliest = struct.unpack_from(f"<{width}f", data, logprobs_at)
        return cls(token, own_logprob, rank, tuple(ids), tuple(likeliest))


Logprobs = tuple[tuple[TokenLogprobs, ...], ...]  # per row, one for each token


def pack_part(first: int, count: int, lines: bytes) -> bytes:
    """The part with the lines of `count` tokens."""
    return _HEAD.pack(first, count, len(lines) // (2 * WORD_BYTES * count)) + lines


def unpack_parts(
    data: bytes, prompt: Sequence[int]
) -> Iterator[tuple[int, TokenLogprobs]]:
    """The records in parts of a prompt, each with its token's index. Raises ValueError if
    the parts are cut off, or those of a longer prompt.
    """
    offset = 0
    while offset < len(data):
        if len(data) - offset < _HEAD.size:
            raise ValueError("log-probabilities of a prompt end in the middle")
        first, count, width = _HEAD.unpack_from(data, offset)
        offset, half = offset + _HEAD.size, WORD_BYTES * width
        if len(data) - offset < 2 * half * count:
            raise ValueError("log-probabilities of a prompt end in the middle")
        if first + count > len(prompt):
            raise ValueError("log-probabilities are those of a longer prompt")
        for index in range(first, first + count):
            yield (
                index,
                TokenLogprobs.read(prompt[index], data, offset, offset + half, width),
            )
            offset += 2 * half

"""Log-probabilities of prompts as bytes: what was packed is read again."""

import struct

import pytest

from minfer.records.plan import TokenLogprobs
from minfer.records.prompt_logprobs import PromptPart, packed, parts_of


def part(first: int, count: int, width: int) -> PromptPart:
    numbers = range(first, first + count * width)
    ids = struct.pack(f"<{len(numbers)}i", *numbers)
    logprobs = struct.pack(f"<{len(numbers)}f", *(-n / 4 for n in numbers))
    return PromptPart(first, count, width, ids, logprobs)


def test_parts_are_read_as_they_were_packed() -> None:
    parts = [part(1, 3, 2), part(4, 1, 1), part(3, 2, 4)]
    assert [*parts_of(b"".join(map(packed, parts)))] == parts
    assert [*parts_of(b"")] == []


def test_a_line_has_the_rank_then_the_likeliest() -> None:
    told = part(8, 2, 3).line(1)
    assert told == TokenLogprobs(-11 / 4, 11, (12, 13), (-12 / 4, -13 / 4))
    assert part(8, 2, 1).line(0) == TokenLogprobs(-2.0, 8)


def test_bytes_that_end_in_the_middle_are_no_parts() -> None:
    data = packed(part(1, 3, 2))
    for cut in (1, 11, 12, len(data) - 1):
        with pytest.raises(ValueError, match="end in the middle"):
            list(parts_of(data[:cut]))

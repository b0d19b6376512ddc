"""Log-probabilities of prompts as bytes: what was packed is read again."""

import struct

import pytest

from minfer.records.token_logprobs import TokenLogprobs, pack_part, unpack_parts

PROMPT = (50, 51, 52, 53, 54)


def line(rank: int, *likeliest: int) -> bytes:
    """The line of a token: its log-probability is -rank / 4, those of others likewise."""
    ids = (rank, *likeliest)
    return struct.pack(f"<{len(ids)}i{len(ids)}f", *ids, *(-one / 4 for one in ids))


def test_a_line_has_the_rank_then_the_likeliest() -> None:
    found = TokenLogprobs.read(7, b"." + line(11, 12, 13), 1, 13, width=3)
    assert found == TokenLogprobs(7, -11 / 4, 11, (12, 13), (-12 / 4, -13 / 4))
    found = TokenLogprobs.read(7, line(11, 12, 13), 0, 12, width=1)
    assert found == TokenLogprobs(7, -11 / 4, 11)


def test_parts_are_read_as_they_were_packed() -> None:
    parts = pack_part(1, 2, line(4, 9) + line(1, 8)), pack_part(2, 1, line(3))
    assert [*unpack_parts(b"".join(parts), PROMPT)] == [
        (1, TokenLogprobs(51, -1.0, 4, (9,), (-2.25,))),
        (2, TokenLogprobs(52, -0.25, 1, (8,), (-2.0,))),
        (2, TokenLogprobs(52, -0.75, 3)),
    ]
    assert [*unpack_parts(b"", PROMPT)] == []


def test_bytes_that_end_in_the_middle_are_no_parts() -> None:
    data = pack_part(1, 3, line(4, 9) * 3)
    for cut in (1, 11, 12, len(data) - 1):
        with pytest.raises(ValueError, match="end in the middle"):
            list(unpack_parts(data[:cut], PROMPT))
    with pytest.raises(ValueError, match="those of a longer prompt"):
        list(unpack_parts(data, PROMPT[:3]))

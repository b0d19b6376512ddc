"""Log-probabilities as users read them, and what is kept of a prompt until then."""

import struct

from minfer.effects.setup.folders import bundled_folder
from minfer.effects.text.logprobs_by_id import PromptScores, logprobs_by_id
from minfer.effects.text.outputs import Logprob
from minfer.effects.text.tokenizer import Tokenizer
from minfer.records.token_logprobs import TokenLogprobs, pack_part

PROMPT = (5, 6, 7, 8, 9)


def part(first: int, count: int) -> bytes:
    """Of tokens whose rank is their place, and whose likeliest one is 300."""
    lines = [struct.pack("<2i2f", first + i, 3, -2.0, -0.5) for i in range(count)]
    return pack_part(first, count, b"".join(lines))


def ranks(scores: PromptScores) -> list[int | None] | None:
    reported = scores.by_token()
    if reported is None:
        return None
    return [
        None if value is None else value[token].rank
        for token, value in zip(PROMPT, reported, strict=True)
    ]


def test_a_token_comes_first_and_then_the_likeliest() -> None:
    beside = TokenLogprobs(7, -2.0, 9, (300, 301), (-0.1, -0.2))
    assert [*logprobs_by_id(beside, None).items()] == [
        (7, Logprob(-2.0, 9)),
        (300, Logprob(-0.1, 1)),
        (301, Logprob(-0.2, 2)),
    ]
    tokenizer = Tokenizer(bundled_folder())
    (x,) = tokenizer.encode("x", add_special_tokens=False)
    assert logprobs_by_id(TokenLogprobs(x, -1.0, 1), tokenizer) == {
        x: Logprob(-1.0, 1, "x")
    }


def test_parts_are_joined_and_what_comes_twice_counts_once() -> None:
    for updates in (
        [part(1, 4)],
        [part(1, 2), part(3, 2)],
        [part(1, 2), part(1, 3), part(1, 1), part(2, 3)],
        [part(1, 1) + part(2, 1), part(1, 4)],
    ):
        scores = PromptScores(PROMPT)
        assert ranks(scores) is None
        for update in updates:
            scores.unread_chunks.append(update)
        assert ranks(scores) == [None, 1, 2, 3, 4]
        assert scores.by_token() is scores.by_token()
        assert not scores.unread_chunks


def test_a_prompt_that_was_not_computed_has_none() -> None:
    scores = PromptScores(PROMPT)
    # what is between them never came
    scores.unread_chunks.extend((part(1, 2), part(4, 1)))
    assert scores.by_token() is None
    assert PromptScores((5,)).by_token() == [None]

"""Log-probabilities of output tokens, in the two shapes that OpenAI's API has for them.

Conversations get a list with an object for each token; completions, the older endpoint,
get parallel lists, and offsets into the text.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Final, TypedDict

from minfer.effects.text.outputs import Logprob
from minfer.effects.text.tokenizer import Tokenizer

LEAST: Final = -9999.0  # as low as OpenAI goes: JSON has no infinity
Scored = Sequence[dict[int, Logprob]]  # of tokens: by id, its own first


class TokenLogprob(TypedDict):
    """A token and its score."""

    token: str
    logprob: float
    bytes: list[int] | None  # None without a tokenizer


def token_logprob(
    token: int, score: Logprob, tokenizer: Tokenizer | None
) -> TokenLogprob:
    """A token and its score, as both shapes tell it."""
    spelled = None if tokenizer is None else [*tokenizer.token_bytes(token)]
    text = score.decoded_token or f"token_id:{token}"  # without a text, vLLM's name
    return {"token": text, "logprob": max(score.logprob, LEAST), "bytes": spelled}


def chat_logprobs(
    scored: Scored, top: int, tokenizer: Tokenizer | None
) -> dict[str, object]:
    """Scores of a conversation's tokens, each with its `top` likeliest rivals."""
    content = []
    for by_id in scored:
        every = [token_logprob(*one, tokenizer) for one in by_id.items()]
        likeliest = sorted(every, key=lambda one: -one["logprob"])
        content.append({**every[0], "top_logprobs": likeliest[:top]})
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Scores of a completion's tokens: offsets go on from one part to the next."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._lengths: dict[int, int] = {}  # characters told so far, by choice

    def told(self, choice: int, scored: Scored) -> dict[str, object]:
        """What is told of a choice's next tokens."""
        every = [
            [token_logprob(*one, self._tokenizer) for one in by_id.items()]
            for by_id in scored
        ]
        own = [of_token[0] for of_token in every]
        begin = self._lengths.get(choice, 0)
        *offsets, end = accumulate(map(_characters, own), initial=begin)
        self._lengths[choice] = end
        # Of tokens spelled alike, the drawn or else the likelier one is told of.
        named = [
            {one["token"]: one["logprob"] for one in reversed(of_token)}
            for of_token in every
        ]
        return {
            "tokens": [one["token"] for one in own],
            "token_logprobs": [one["logprob"] for one in own],
            "top_logprobs": named,
            "text_offset": offsets,
        }


def _characters(token: TokenLogprob) -> int:
    """How many characters begin in a token's bytes, which are UTF-8."""
    return sum(byte & 0xC0 != 0x80 for byte in token["bytes"] or ())

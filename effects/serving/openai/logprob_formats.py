"""Log-probabilities of tokens, in the two formats of OpenAI's API, and in vLLM's.

Conversations get a list with an object for each token; completions, the older endpoint,
get parallel lists, and offsets into the text. vLLM's format for a prompt is a list with
an object for each token, by token id.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Final, TypedDict

from minfer.effects.serving.protocol import Include
from minfer.effects.text.logprobs_by_id import decode_token
from minfer.effects.text.outputs import CompletionOutput, Logprob, PromptLogprobs
from minfer.effects.text.tokenizer import Tokenizer

MIN_LOGPROB: Final = -9999.0  # as low as OpenAI goes: JSON has no infinity
TokenLogprobs = Sequence[dict[int, Logprob]]  # of tokens: by id, its own first


class TokenScore(TypedDict):
    """A token and its score."""

    token: str
    logprob: float
    bytes: list[int] | None  # None without a tokenizer


def token_logprob(
    token: int, score: Logprob, tokenizer: Tokenizer | None, *, as_ids: bool = False
) -> TokenScore:
    """A token and its score, in the form of both formats."""
    spelled = None if tokenizer is None else [*tokenizer.token_bytes(token)]
    name = _id_name(token) if as_ids else _token_name(token, score)
    return {"token": name, "logprob": _value(score), "bytes": spelled}


def chat_logprobs(
    scored: TokenLogprobs, top: int, tokenizer: Tokenizer | None, *, as_ids: bool = False
) -> dict[str, object]:
    """Scores of a conversation's tokens, each with the `top` likeliest tokens. Tokens are
    named by their text, or `as_ids`.
    """
    content = []
    for by_id in scored:
        token_scores = [
            token_logprob(*item, tokenizer, as_ids=as_ids) for item in by_id.items()
        ]
        likeliest = sorted(token_scores, key=lambda token: -token["logprob"])
        content.append({**token_scores[0], "top_logprobs": likeliest[:top]})
    return {"content": content, "refusal": None}


def format_prompt_logprobs(
    delta: CompletionOutput, include: Include
) -> list[object] | None:
    """Scores of a prompt's tokens, in vLLM's format."""
    if delta.prompt_logprobs is None or include.prompt_logprobs is None:
        return None
    top = include.prompt_logprobs
    return [
        by_id
        and {str(token): _entry(score) for token, score in _likeliest(by_id, top).items()}
        for by_id in delta.prompt_logprobs
    ]


def _entry(score: Logprob) -> dict[str, object]:
    return {
        "logprob": _value(score),
        "rank": score.rank,
        "decoded_token": score.decoded_token,
    }


def _likeliest(by_id: dict[int, Logprob], top: int) -> dict[int, Logprob]:
    """A token's own score, and those of the `top` likeliest tokens."""
    own_entry, *other_entries = by_id.items()
    return dict(
        [
            own_entry,
            *((token, score) for token, score in other_entries if score.rank <= top),
        ]
    )


class CompletionScores(TypedDict):
    """Scores of successive tokens; null for a token without a predecessor."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionLogprobs:
    """Scores of a completion's tokens: offsets continue from one part to the next. Tokens
    are named by their text, or `as_ids`.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._lengths: dict[int, int] = {}  # characters written so far, by choice

    def next_scores(self, choice: int, scored: TokenLogprobs) -> CompletionScores:
        """The scores of a choice's next tokens."""
        ids = [next(iter(by_id)) for by_id in scored]
        begin = self._lengths.get(choice, 0)
        *offsets, end = accumulate(map(self._characters, ids), initial=begin)
        self._lengths[choice] = end
        return self._columns(ids, scored, offsets)

    def echo_scores(
        self, choice: int, text: str, ids: Sequence[int], scored: PromptLogprobs, top: int
    ) -> CompletionScores:
        """The scores of a prompt that is echoed before a choice's own tokens; `text` is
        the prompt's.
        """
        self._lengths[choice] = len(text)
        likeliest = [_likeliest(by_id, top) if by_id else None for by_id in scored]
        return self._columns(ids, likeliest, self._text_offsets(text, ids))

    def _columns(
        self,
        ids: Sequence[int],
        scored: Sequence[dict[int, Logprob] | None],
        offsets: Iterable[int],
    ) -> CompletionScores:
        pairs = [*zip(ids, scored, strict=True)]
        return {
            "tokens": [self._name(token) for token in ids],
            "token_logprobs": [
                _value(by_id[token]) if by_id else None for token, by_id in pairs
            ],
            "top_logprobs": [
                _by_text(by_id, as_ids=self._as_ids) if by_id else None
                for by_id in scored
            ],
            "text_offset": [*offsets],
        }

    def _name(self, token: int) -> str:
        return _id_name(token) if self._as_ids else token_text(token, self._tokenizer)

    def _characters(self, token: int) -> int:
        """How many characters of a text belong to a token: those that begin in its bytes,
        which are UTF-8. Special tokens are not in the text.
        """
        tokenizer = self._tokenizer
        if tokenizer is None or token in tokenizer.special_ids:
            return 0
        return sum(byte & 0xC0 != 0x80 for byte in tokenizer.token_bytes(token))

    def _text_offsets(self, text: str, ids: Sequence[int]) -> Iterator[int]:
        """The offsets of tokens in their prompt's text.

        A special token may be in that text, or not; and tokenizers put a space before a
        text that is not in it.
        """
        offset = 0
        for token in ids:
            yield min(offset, len(text))
            word = "" if self._tokenizer is None else token_text(token, self._tokenizer)
            if self._tokenizer is not None and token in self._tokenizer.special_ids:
                offset += len(word) if text.startswith(word, offset) else 0
            else:
                added = offset == 0 and word.startswith(" ") and not text.startswith(" ")
                offset += self._characters(token) - added


def join_scores(first: CompletionScores, second: CompletionScores) -> CompletionScores:
    """Join the scores of tokens with those of the following tokens."""
    return {
        "tokens": first["tokens"] + second["tokens"],
        "token_logprobs": first["token_logprobs"] + second["token_logprobs"],
        "top_logprobs": first["top_logprobs"] + second["top_logprobs"],
        "text_offset": first["text_offset"] + second["text_offset"],
    }


def token_text(token: int, tokenizer: Tokenizer | None) -> str:
    """A token's text, or vLLM's name for one without."""
    return decode_token(token, tokenizer) or _id_name(token)


def _id_name(token: int) -> str:
    """vLLM's name for a token by its id."""
    return f"token_id:{token}"


def _value(score: Logprob) -> float:
    return max(score.logprob, MIN_LOGPROB)


def _by_text(by_id: dict[int, Logprob], *, as_ids: bool) -> dict[str, float]:
    """Scores by text, or by id: among tokens with equal texts, that of the sampled one,
    or else of the likelier one.
    """
    items = reversed(by_id.items())
    return {
        _id_name(token) if as_ids else _token_name(token, score): _value(score)
        for token, score in items
    }


def _token_name(token: int, score: Logprob) -> str:
    return score.decoded_token or _id_name(token)

"""Checks of a request's logit changes: bad words become token ids, and impossible changes
raise errors.

A request that passes here has a token at every draw: neither hidden stop ids nor the ends
of bad words remove the last one that is allowed.
"""

from collections.abc import Sequence
from typing import Final

from minfer.effects.live.errors import RequestError
from minfer.effects.text.tokenizer import TextError, Tokenizer
from minfer.sampling.params import MAX_ADJUSTMENTS, SamplingParams

BadWords = tuple[tuple[int, ...], ...]
_BIAS_FIELD: Final = "logit_bias"
_ALLOWED_FIELD: Final = "allowed_token_ids"
_BAD_WORDS_FIELD: Final = "bad_words"


def read_bad_words(words: Sequence[str], tokenizer: Tokenizer | None) -> BadWords:
    """Returns words as token ids: each as at the beginning of a text, and after a space.
    Raises RequestError.
    """
    if words and tokenizer is None:
        raise RequestError(
            "bad_words: there is no tokenizer to read them", param=_BAD_WORDS_FIELD
        )
    token_ids = dict[tuple[int, ...], None]()
    for word in words:
        stripped = word.lstrip() or word
        for text in (stripped, f" {stripped}"):
            token_ids[_encode(text, tokenizer)] = None
    return tuple(token_ids)


def _encode(text: str, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    try:
        ids = tokenizer.encode(text, add_special_tokens=False) if tokenizer else ()
    except TextError as error:
        raise RequestError(
            f"bad_words: {text!r}: {error}", param=_BAD_WORDS_FIELD
        ) from None
    if not ids:
        raise RequestError(f"bad_words: {text!r} has no token", param=_BAD_WORDS_FIELD)
    return tuple(ids)


def check_shape(
    vocab_size: int, params: SamplingParams, stops: frozenset[int], bad_words: BadWords
) -> None:
    """Raise RequestError for changes that a vocabulary of `vocab_size` tokens does not
    allow; `stops` end the output.
    """
    ids_of = {
        _BIAS_FIELD: [token for token, _ in params.logit_bias],
        _ALLOWED_FIELD: params.allowed_token_ids or (),
    }
    for name, ids in ids_of.items():
        if (largest := max(ids, default=0)) >= vocab_size:
            raise RequestError(
                f"{name}: {largest} is outside the vocabulary; ids are from 0 to "
                f"{vocab_size - 1}",
                param=name,
            )
    hidden_stops = stops if params.min_tokens else frozenset[int]()
    _check_count(params, len(hidden_stops), bad_words)
    removed = hidden_stops.union(word[-1] for word in bad_words)
    allowed = params.allowed_token_ids
    candidates = (
        set(range(vocab_size) if allowed is None else allowed) if removed else {0}
    )
    if not candidates - removed:
        name = _BAD_WORDS_FIELD if allowed is None else _ALLOWED_FIELD
        raise RequestError(
            f"{name}: no token is left that is neither the end of a bad word nor, until "
            f"min_tokens, one that ends the output; leave one of these out",
            param=name,
        )


def _check_count(params: SamplingParams, num_stops: int, bad_words: BadWords) -> None:
    counts = {
        _BAD_WORDS_FIELD: sum(map(len, bad_words)),
        _BIAS_FIELD: len(params.logit_bias),
        "min_tokens": num_stops,
    }
    if (total := sum(counts.values())) > MAX_ADJUSTMENTS:
        name = max(counts, key=lambda field: counts[field])
        raise RequestError(
            f"{name}: {total} single tokens are to be changed (biases, tokens of bad "
            f"words, ids that end the output until min_tokens); at most "
            f"{MAX_ADJUSTMENTS} can be",
            param=name,
        )

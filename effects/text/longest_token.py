"""The most characters of one token: a bound on a text before it is encoded.

A text of more characters than (tokens of the context) x (the most characters of a token)
cannot fit, and is refused unread. That holds where every character of a text ends up in
some token, as in byte-level BPE, and in BPE that falls back to bytes. Where a tokenizer
drops characters (words of any length that become one unknown token, blanks that are
stripped), the bound is unknown, and nothing is refused.
"""

import json
from typing import Any, Final

from tokenizers import Tokenizer as Backend
from tokenizers.pre_tokenizers import ByteLevel

# Canonical composition makes one character of at most four: Unicode's longest
# decompositions.
_MAX_COMPOSED_CHARS: Final = 4
# The most characters of a text that a normalizer makes one; others are unknown.
_MAX_SHRINKS: Final = {
    "NFD": 1,
    "NFC": _MAX_COMPOSED_CHARS,
    "NFKD": 1,
    "NFKC": _MAX_COMPOSED_CHARS,
    "Prepend": 1,
}
_LOSSLESS: Final = {"ByteLevel", "Metaspace", "Digits"}  # they split, and drop nothing


def max_token_chars(backend: Backend) -> int | None:
    """The most characters of a text that can become one token; None: unknown."""
    model = backend.model
    added = backend.get_added_tokens_decoder().values()
    shrink = _max_shrink(component_state(backend.normalizer))
    # A token that takes the blanks beside it takes any number of them.
    greedy = any(token.lstrip or token.rstrip for token in added)
    if type(model).__name__ != "BPE" or greedy or shrink is None:
        return None
    vocabulary = backend.get_vocab(with_added_tokens=True)
    if not _drops_nothing(component_state(backend.pre_tokenizer)):
        return None
    if not _has_all_bytes(backend, vocabulary):
        return None
    return shrink * max(map(len, vocabulary))


def component_state(component: Any) -> dict[str, Any]:
    """A component of a tokenizer in the form of tokenizer.json; empty if it is
    missing.
    """
    state = {} if component is None else json.loads(component.__getstate__())
    return state if isinstance(state, dict) else {}


def _max_shrink(normalizer: dict[str, Any]) -> int | None:
    """The most characters that a normalizer may make one; None: any number."""
    kind = normalizer.get("type")
    if kind is None:
        return 1
    if kind == "Sequence":
        product = 1
        for step in normalizer["normalizers"]:
            factor = _max_shrink(step)
            if factor is None:
                return None
            product *= factor
        return product
    if kind == "Replace":  # one character by one or more, as Llama's blanks are
        single = len(normalizer["pattern"].get("String", "")) == 1
        return 1 if single and normalizer["content"] else None
    return _MAX_SHRINKS.get(kind)


def _drops_nothing(pre_tokenizer: dict[str, Any]) -> bool:
    """Whether splitting keeps all of a text."""
    kind = pre_tokenizer.get("type")
    if kind == "Sequence":
        return all(map(_drops_nothing, pre_tokenizer["pretokenizers"]))
    if kind in ("Split", "Punctuation"):
        return bool(pre_tokenizer["behavior"] != "Removed")
    return kind is None or kind in _LOSSLESS


def _has_all_bytes(backend: Backend, vocabulary: dict[str, int]) -> bool:
    """Whether every byte has a token, so that none is dropped or joined as unknown."""
    if backend.model.byte_fallback:
        return all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    level = type(backend.decoder).__name__ == "ByteLevel"
    return level and vocabulary.keys() >= set(ByteLevel.alphabet())

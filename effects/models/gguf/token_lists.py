"""The tokens in a GGUF file's metadata, and the ids that end a sequence."""

from collections.abc import Iterator
from typing import Final

from minfer.effects.models.gguf.metadata import GgufMetadata

TOKENS: Final = "tokenizer.ggml.tokens"
TOKEN_TYPES: Final = "tokenizer.ggml.token_type"  # noqa: S105 - a key, no password
# Types of tokens (llama.cpp's). Control tokens are special; unused ones are padding of
# the vocabulary.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
_KEYS: Final = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
# Control tokens that end a turn, by their texts: older files name only `eos` by a key.
_TEXTS: Final = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|endoftext|>",
    "<end_of_turn>",
    "<｜end▁of▁sentence｜>",
)


def token_types(read: GgufMetadata) -> tuple[int, ...]:
    """Returns the types of all tokens; without types in the file, all are normal. Raises
    `GgufError`.
    """
    count = read.array(TOKENS).count
    if read.get(TOKEN_TYPES) is None:
        return (NORMAL,) * count
    found = read.array(TOKEN_TYPES).numbers()
    if len(found) != count:
        raise read.error(TOKEN_TYPES, f"an array of {count} elements, as {TOKENS} is")
    return found


def token_texts(read: GgufMetadata) -> dict[int, str]:
    """Returns the texts of tokens that are not unused, by their ids. Raises
    `GgufError`.
    """
    texts = read.array(TOKENS).texts()
    kinds = enumerate(token_types(read))
    return {token: texts[token] for token, kind in kinds if kind != UNUSED}


def stop_ids(read: GgufMetadata) -> tuple[int, ...]:
    """Returns the ids of tokens that end a sequence. Raises `GgufError` for ids outside
    the vocabulary.
    """
    return tuple(dict.fromkeys(_ids(read)))


def _ids(read: GgufMetadata) -> Iterator[int]:
    listed = read.get(TOKENS) is not None
    count = read.array(TOKENS).count if listed else 1 << 31
    for key in _KEYS:
        if read.get(key) is not None:
            yield read.whole(key, low=0, below=count)
    if not listed:
        return
    types = token_types(read)
    for token, text in enumerate(read.array(TOKENS).texts()):
        if types[token] == CONTROL and text in _TEXTS:
            yield token

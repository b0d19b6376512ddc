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
    "<eos>",
    "<turn|>",
    "<｜end▁of▁sentence｜>",
)
# Gemma 4's, behind a call of a tool, which files do not mark as a control token.
_AWAITS_TOOL: Final = "<|tool_response>"


def token_types(metadata: GgufMetadata) -> tuple[int, ...]:
    """Returns the types of all tokens; without types in the file, all are normal. Raises
    `GgufError`.
    """
    count = metadata.array(TOKENS).count
    if metadata.get(TOKEN_TYPES) is None:
        return (NORMAL,) * count
    types = metadata.array(TOKEN_TYPES).numbers()
    if len(types) != count:
        raise metadata.error(TOKEN_TYPES, f"an array of {count} elements, as {TOKENS} is")
    return types


def token_texts(metadata: GgufMetadata) -> dict[int, str]:
    """Returns the texts of tokens that are not unused, by their ids. Raises
    `GgufError`.
    """
    texts = metadata.array(TOKENS).texts()
    kinds = enumerate(token_types(metadata))
    return {token: texts[token] for token, kind in kinds if kind != UNUSED}


def stop_ids(metadata: GgufMetadata) -> tuple[int, ...]:
    """Returns the ids of tokens that end a sequence. Raises `GgufError` for ids outside
    the vocabulary.
    """
    return tuple(dict.fromkeys(_ids(metadata)))


def _ids(metadata: GgufMetadata) -> Iterator[int]:
    has_tokens = metadata.get(TOKENS) is not None
    count = metadata.array(TOKENS).count if has_tokens else 1 << 31
    for key in _KEYS:
        if metadata.get(key) is not None:
            yield metadata.integer(key, low=0, below=count)
    if not has_tokens:
        return
    types = token_types(metadata)
    for token, text in enumerate(metadata.array(TOKENS).texts()):
        is_end = types[token] == CONTROL and text in _TEXTS
        if is_end or (text == _AWAITS_TOOL and types[token] in (CONTROL, USER_DEFINED)):
            yield token

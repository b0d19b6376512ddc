"""A tokenizer of the `tokenizers` library, made from a checkpoint's files.

It follows transformers' `AutoTokenizer` on the same files: `side_files` has the rules for
files, `tokenizer_classes` the parts of classes.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend

from minfer.effects.models.checkpoint.checkpoint import CheckpointError, read_optional
from minfer.effects.models.gguf.container import is_gguf
from minfer.effects.text.gguf_tokenizer import gguf_backend
from minfer.effects.text.longest_token import component_state
from minfer.effects.text.side_files import (
    SpecialTokens,
    Templates,
    Token,
    read_templates,
    special_tokens,
    token_content,
)
from minfer.effects.text.tokenizer_classes import CLASSES, TokenizerClass, class_name
from minfer.effects.text.tokenizer_conversion import (
    ConversionError,
    converted_folder,
    sources,
)


class TokenizerError(CheckpointError):
    """The tokenizer of a checkpoint is missing or unusable."""


def load_backend(folder: Path) -> tuple[Backend, SpecialTokens, Templates]:
    """The tokenizer of a folder or GGUF file, the special tokens it names, and its chat
    templates.

    Raises `TokenizerError` if tokenizer.json is corrupt, or missing and cannot be made of
    other files, `CorruptFileError` for the small files beside it.
    """
    if is_gguf(folder):
        return gguf_backend(folder)
    if not (folder / "tokenizer.json").exists() and sources(folder):
        try:
            folder = converted_folder(folder)
        except ConversionError as error:
            raise TokenizerError(str(error)) from error
    path = folder / "tokenizer.json"
    config = read_optional(folder / "tokenizer_config.json")
    backend, data = _read_backend(path)
    model = read_optional(folder / "config.json")
    tokenizer_class = CLASSES.get(class_name(model, config, b'"ByteLevel"' in data))
    stored = backend.get_added_tokens_decoder()
    padding = backend.padding
    if padding is not None and (
        tokenizer_class is None or tokenizer_class.pad_token_from_file
    ):
        config.setdefault("pad_token", padding["pad_token"])
    tokens = special_tokens(folder, config, stored, tokenizer_class)
    try:
        if tokenizer_class is not None and not _has_class_components(
            backend, tokenizer_class, config, tokens
        ):
            backend = Backend.from_str(
                json.dumps(_with_class_components(data, tokenizer_class, config, tokens))
            )
    except Exception as error:  # the library raises bare Exception
        raise _unusable(path, f"not what its tokenizer_class takes ({error})") from error
    _add_tokens(backend, tokens, tokenizer_class)
    if tokenizer_class is not None and tokenizer_class.begins != "as the file says":
        bos = (
            tokens.texts.get("bos_token")
            if tokenizer_class.begins == "with bos_token"
            else None
        )
        ids = [] if bos is None else [(bos, backend.token_to_id(bos))]
        begin = "" if bos is None else f"{bos} "
        backend.post_processor = processors.TemplateProcessing(
            f"{begin}$A", f"{begin}$A $B", ids
        )
    backend.encode_special_tokens = config.get("split_special_tokens") is True
    backend.no_padding()
    backend.no_truncation()
    return backend, tokens, read_templates(folder, config)


def _read_backend(path: Path) -> tuple[Backend, bytes]:
    try:
        data = path.read_bytes()
        return Backend.from_buffer(data), data
    except FileNotFoundError as error:
        raise _unusable(path, "not found") from error
    except Exception as error:  # the library raises bare Exception for any fault
        raise _unusable(path, f"corrupt or of an unknown kind ({error})") from error


def _unusable(path: Path, reason: str) -> TokenizerError:
    remedy = "AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
    return TokenizerError(f"{path}: {reason}; write it with transformers: {remedy}")


def _bpe_settings(
    tokenizer_class: TokenizerClass, tokens: SpecialTokens
) -> dict[str, Any]:
    """The settings of a class's byte-pair encoding."""
    unknown = tokens.texts.get("unk_token") if tokenizer_class.unknown_token else None
    return {
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **tokenizer_class.model,
    }


def _has_class_components(
    backend: Backend,
    tokenizer_class: TokenizerClass,
    config: Mapping[str, Any],
    tokens: SpecialTokens,
) -> bool:
    """Whether tokenizer.json has the parts of the class already: large vocabularies take
    seconds to rebuild.
    """
    model: Any = backend.model
    if type(model).__name__ != "BPE":
        return False
    for name, value in _bpe_settings(tokenizer_class, tokens).items():
        if (getattr(model, name) or None) != (value or None):
            return False
    for name, component in tokenizer_class.components(config).items():
        state = component_state(getattr(backend, name))
        is_byte_level = name == "decoder" and state.get("type") == "ByteLevel"
        if is_byte_level and component["type"] == "ByteLevel":
            continue  # whose settings have no effect in a decoder
        if _relevant_state(state) != _relevant_state(component or {}):
            return False
    stored = [token for _, token in sorted(backend.get_added_tokens_decoder().items())]
    return [*map(repr, stored)] == [*map(repr, tokens.added[: len(stored)])]


def _relevant_state(state: Any) -> Any:
    """A part of a tokenizer without fields that do not influence token ids."""
    if isinstance(state, list):
        return [*map(_relevant_state, state)]
    if isinstance(state, dict):
        return {k: _relevant_state(v) for k, v in state.items() if k != "trim_offsets"}
    return state


def _with_class_components(
    data: bytes,
    tokenizer_class: TokenizerClass,
    config: Mapping[str, Any],
    tokens: SpecialTokens,
) -> dict[str, Any]:
    """The tokenizer of tokenizer.json, with the parts of the class."""
    state: dict[str, Any] = json.loads(data)
    old_model = state["model"]
    vocabulary = old_model["vocab"]
    if isinstance(vocabulary, list):  # of a unigram model, with scores
        vocabulary = {entry[0]: i for i, entry in enumerate(vocabulary)}
    tables = {"vocab": vocabulary, "merges": old_model.get("merges") or []}
    model = {"type": "BPE", **_bpe_settings(tokenizer_class, tokens), **tables}
    return {
        **state,
        **tokenizer_class.components(config),
        "model": model,
        "added_tokens": [],
    }


def _add_tokens(
    backend: Backend, tokens: SpecialTokens, tokenizer_class: TokenizerClass | None
) -> None:
    """Add the tokens of the files, in transformers' order, on which their ids depend."""
    names = set(tokens.texts.values())
    known_texts = {token.content for token in backend.get_added_tokens_decoder().values()}
    known_texts |= {token.content for token in tokens.added}
    other_tokens = (*tokens.named.values(), *tokens.extra)
    new_tokens: list[Token] = [*tokens.added]
    for token in other_tokens:
        # Of equal texts with other flags, the later one is used.
        if token_content(token) not in known_texts and token not in new_tokens:
            new_tokens.append(token)
    backend.add_tokens(
        [
            _as_special(token)
            if isinstance(token, str) or token.content in names
            else token
            for token in new_tokens
        ]
    )
    if tokenizer_class is not None and tokenizer_class.adds_again == "texts":
        repeated = [
            AddedToken(token_content(token), special=True) for token in other_tokens
        ]
        backend.add_tokens(repeated)
    elif tokenizer_class is not None and tokenizer_class.adds_again == "tokens":
        backend.add_special_tokens([_as_special(token) for token in other_tokens])


def _as_special(token: Token) -> AddedToken:
    """The token as a special one."""
    if isinstance(token, str):
        return AddedToken(token, special=True)
    if not token.special:
        token.special = True
    return token

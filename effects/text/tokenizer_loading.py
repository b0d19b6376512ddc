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
from minfer.effects.text.longest_token import state_of
from minfer.effects.text.side_files import (
    SpecialTokens,
    Templates,
    Token,
    read_templates,
    special_tokens,
    text_of,
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
    backend, data = _read(path)
    model = read_optional(folder / "config.json")
    kind = CLASSES.get(class_name(model, config, b'"ByteLevel"' in data))
    stored = backend.get_added_tokens_decoder()
    padding = backend.padding
    if padding is not None and (kind is None or kind.pads_as_the_file_says):
        config.setdefault("pad_token", padding["pad_token"])
    tokens = special_tokens(folder, config, stored, kind)
    try:
        if kind is not None and not _is_made_so(backend, kind, config, tokens):
            backend = Backend.from_str(json.dumps(_remade(data, kind, config, tokens)))
    except Exception as error:  # the library raises bare Exception
        raise _unusable(path, f"not what its tokenizer_class takes ({error})") from error
    _add_tokens(backend, tokens, kind)
    if kind is not None and kind.begins != "as the file says":
        bos = tokens.texts.get("bos_token") if kind.begins == "with bos_token" else None
        ids = [] if bos is None else [(bos, backend.token_to_id(bos))]
        begin = "" if bos is None else f"{bos} "
        backend.post_processor = processors.TemplateProcessing(
            f"{begin}$A", f"{begin}$A $B", ids
        )
    backend.encode_special_tokens = config.get("split_special_tokens") is True
    backend.no_padding()
    backend.no_truncation()
    return backend, tokens, read_templates(folder, config)


def _read(path: Path) -> tuple[Backend, bytes]:
    try:
        data = path.read_bytes()
        return Backend.from_buffer(data), data
    except FileNotFoundError as error:
        raise _unusable(path, "not found") from error
    except Exception as error:  # the library raises bare Exception for any fault
        raise _unusable(path, f"corrupt or of an unknown kind ({error})") from error


def _unusable(path: Path, why: str) -> TokenizerError:
    remedy = "AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
    return TokenizerError(f"{path}: {why}; write it with transformers: {remedy}")


def _model(kind: TokenizerClass, tokens: SpecialTokens) -> dict[str, Any]:
    """The settings of a class's byte-pair encoding."""
    unknown = tokens.texts.get("unk_token") if kind.unknown_token else None
    return {
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **kind.model,
    }


def _is_made_so(
    backend: Backend,
    kind: TokenizerClass,
    config: Mapping[str, Any],
    tokens: SpecialTokens,
) -> bool:
    """Whether tokenizer.json has the parts of the class already: large vocabularies take
    seconds to rebuild.
    """
    model: Any = backend.model
    if type(model).__name__ != "BPE":
        return False
    for name, value in _model(kind, tokens).items():
        if (getattr(model, name) or None) != (value or None):
            return False
    for name, part in kind.parts(config).items():
        found = state_of(getattr(backend, name))
        levels = name == "decoder" and found.get("type") == "ByteLevel"
        if levels and part["type"] == "ByteLevel":
            continue  # whose settings have no effect in a decoder
        if _bare(found) != _bare(part or {}):
            return False
    stored = [token for _, token in sorted(backend.get_added_tokens_decoder().items())]
    return [*map(repr, stored)] == [*map(repr, tokens.added[: len(stored)])]


def _bare(part: Any) -> Any:
    """A part of a tokenizer without fields that do not influence token ids."""
    if isinstance(part, list):
        return [*map(_bare, part)]
    if isinstance(part, dict):
        return {k: _bare(v) for k, v in part.items() if k != "trim_offsets"}
    return part


def _remade(
    data: bytes, kind: TokenizerClass, config: Mapping[str, Any], tokens: SpecialTokens
) -> dict[str, Any]:
    """The tokenizer of tokenizer.json, with the parts of the class."""
    state: dict[str, Any] = json.loads(data)
    old = state["model"]
    vocabulary = old["vocab"]
    if isinstance(vocabulary, list):  # of a unigram model, with scores
        vocabulary = {entry[0]: i for i, entry in enumerate(vocabulary)}
    words = {"vocab": vocabulary, "merges": old.get("merges") or []}
    model = {"type": "BPE", **_model(kind, tokens), **words}
    return {**state, **kind.parts(config), "model": model, "added_tokens": []}


def _add_tokens(
    backend: Backend, tokens: SpecialTokens, kind: TokenizerClass | None
) -> None:
    """Add the tokens of the files, in transformers' order, on which their ids depend."""
    names = set(tokens.texts.values())
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    known |= {token.content for token in tokens.added}
    every = (*tokens.named.values(), *tokens.extra)
    wanted: list[Token] = [*tokens.added]
    for token in every:
        # Of equal texts with other flags, the later one is used.
        if text_of(token) not in known and token not in wanted:
            wanted.append(token)
    backend.add_tokens(
        [
            _special(token) if isinstance(token, str) or token.content in names else token
            for token in wanted
        ]
    )
    if kind is not None and kind.adds_again == "texts":
        again = [AddedToken(text_of(token), special=True) for token in every]
        backend.add_tokens(again)
    elif kind is not None and kind.adds_again == "tokens":
        backend.add_special_tokens([_special(token) for token in every])


def _special(token: Token) -> AddedToken:
    """The token as a special one."""
    if isinstance(token, str):
        return AddedToken(token, special=True)
    if not token.special:
        token.special = True
    return token

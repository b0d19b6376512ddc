"""Builds the tokenizer in the metadata of a GGUF file, with the `tokenizers` library.

Two values of `tokenizer.ggml.model` are supported. `gpt2` is byte-level BPE: the file has
the merges, and `tokenizer.ggml.pre` names the pre-tokenizer. `llama` is SentencePiece's
BPE with byte fallback: the file has a score for each token, from which merges are made as
transformers makes them.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from attrs import frozen
from tokenizers import AddedToken, models, processors
from tokenizers import Tokenizer as Backend

from minfer.effects.models.config_reader import UnsupportedModelError
from minfer.effects.models.gguf.config import gguf_config
from minfer.effects.models.gguf.container import GgufError, read_gguf
from minfer.effects.models.gguf.metadata import GgufMetadata
from minfer.effects.models.gguf.token_lists import (
    CONTROL,
    NORMAL,
    TOKENS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    token_types,
)
from minfer.effects.text.gguf_pretokenizers import PRETOKENIZERS
from minfer.effects.text.side_files import SpecialTokens, Templates
from minfer.effects.text.tokenizer_classes import State

_PREFIX: Final = "tokenizer.ggml."
_NAMES: Final = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # so spelled in files
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
}
_TEMPLATE: Final = "tokenizer.chat_template"
LONGEST: Final = 1024  # characters of a token; a longer one has too many merges
_BLANK: Final = "▁"


@frozen(eq=False)
class _Words:
    """The tokens of a file, in the order of their ids."""

    texts: list[str]
    types: tuple[int, ...]

    def vocabulary(self) -> dict[str, int]:
        """Returns the ids of all tokens but unused ones, by their texts."""
        return {
            text: token
            for token, (text, kind) in enumerate(zip(self.texts, self.types, strict=True))
            if kind != UNUSED
        }

    def added(self) -> list[AddedToken]:
        """Returns the added tokens, which are matched before a text is divided."""
        return [
            AddedToken(text, special=kind != USER_DEFINED, normalized=False)
            for text, kind in zip(self.texts, self.types, strict=True)
            if kind in (CONTROL, UNKNOWN, USER_DEFINED) and text
        ]


def gguf_backend(path: Path) -> tuple[Backend, SpecialTokens, Templates]:
    """Returns the tokenizer of a file, the special tokens that it names, and its chat
    templates.

    Raises `GgufError` for damaged metadata, and `UnsupportedModelError` for tokenizers
    that are not supported.
    """
    read = GgufMetadata(read_gguf(path))
    kind = read.text(f"{_PREFIX}model")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModelError(
            f"{path}: metadata {_PREFIX}model = {kind!r:.100} is not supported; gpt2 and "
            f"llama are. Give the Hugging Face checkpoint that the file was made from"
        )
    words = _read_words(read, gguf_config(path)["vocab_size"], byte_level=kind == "gpt2")
    named = _named(read, words)
    try:
        byte_level = kind == "gpt2"
        backend = _byte_level(read, words) if byte_level else _sentencepiece(read, words)
        backend.add_tokens(words.added())
        _add_ends(read, backend, named, bos=_adds_bos(read, byte_level=byte_level))
    except (GgufError, UnsupportedModelError):
        raise
    except Exception as error:  # the library raises bare Exception for any fault
        what = f"the tokenizer cannot be built ({error}); convert the model again"
        raise GgufError(f"{path}: {what}") from error
    tokens = SpecialTokens(added=tuple(words.added()), named=named, extra=())
    return backend, tokens, _templates(read)


def _read_words(read: GgufMetadata, rows: int, *, byte_level: bool) -> _Words:
    """Returns the tokens of a file whose matrix of embeddings has so many rows."""
    texts, types = read.array(TOKENS).texts(), token_types(read)
    if not texts or len(texts) > rows:
        raise read.error(
            TOKENS, f"an array of 1 to {rows} tokens, the rows of embeddings"
        )
    if not byte_level:  # files have Gemma's runs of ▁ as runs of blanks
        texts = [text if text.strip(" ") else _BLANK * len(text) for text in texts]
    words = _Words(texts, types)
    if (longest := max(map(len, texts))) > LONGEST:
        what = f"has a string of {longest} characters; at most {LONGEST} are supported"
        raise read.fault(TOKENS, what)
    if len(words.vocabulary()) != len(texts) - types.count(UNUSED):
        raise read.fault(TOKENS, "has the same string twice")
    return words


def _byte_level(read: GgufMetadata, words: _Words) -> Backend:
    name = read.text(f"{_PREFIX}pre", "")
    how = PRETOKENIZERS.get(name)
    if how is None:
        known = ", ".join(PRETOKENIZERS)
        raise UnsupportedModelError(
            f"{read.file.path}: metadata {_PREFIX}pre = {name!r:.100} is not supported; "
            f"{known} are. Convert the model again with a current llama.cpp, or give the "
            f"Hugging Face checkpoint"
        )
    merges = []
    for i, text in enumerate(read.array(f"{_PREFIX}merges").texts()):
        left, blank, right = text.partition(" ")
        if not left or not right or not blank:
            what = f"has {text!r:.100} as element {i}, not two tokens and a blank between"
            raise read.fault(f"{_PREFIX}merges", what)
        merges.append((left, right))
    vocabulary = words.vocabulary()
    return _built(
        how.parts, models.BPE(vocabulary, merges, ignore_merges=how.ignore_merges)
    )


def _sentencepiece(read: GgufMetadata, words: _Words) -> Backend:
    """Returns SentencePiece's BPE with byte fallback. Raises `UnsupportedModelError` if
    it normalizes white space.
    """
    key = f"{_PREFIX}remove_extra_whitespaces"
    if read.flag(key, default=False):
        raise UnsupportedModelError(
            f"{read.file.path}: metadata {key} = True is not supported; give the Hugging "
            f"Face checkpoint that the file was made from"
        )
    blanks = {"String": " "}
    replace = {"type": "Replace", "pattern": blanks, "content": _BLANK}
    prepend: list[State] = []
    strip: list[State] = []
    if read.flag(f"{_PREFIX}add_space_prefix", default=True):
        prepend = [{"type": "Prepend", "prepend": _BLANK}]
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    back = {"type": "Replace", "pattern": {"String": _BLANK}, "content": " "}
    steps = [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
    parts = {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": steps},
    }
    unknown = words.types.index(UNKNOWN) if UNKNOWN in words.types else None
    bpe = models.BPE(
        words.vocabulary(),
        _merges(read, words),
        unk_token=None if unknown is None else words.texts[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    return _built(parts, bpe)


def _merges(read: GgufMetadata, words: _Words) -> list[tuple[str, str]]:
    """Returns the merges that follow from the scores, in transformers' order."""
    key = f"{_PREFIX}scores"
    scores = read.array(key).numbers()
    if len(scores) != len(words.texts):
        raise read.error(key, f"an array of {len(words.texts)} elements, as {TOKENS} is")
    if read.arch == "gemma3":  # files have no scores of its runs of blanks
        scores = tuple(range(0, -len(words.texts), -1))
    pieces = {
        text: token
        for token, (text, kind) in enumerate(zip(words.texts, words.types, strict=True))
        if kind in (NORMAL, USER_DEFINED)
    }
    found: list[tuple[str, str]] = []
    for text in pieces:
        pairs = [
            (left, right)
            for i in range(1, len(text))
            if (left := text[:i]) in pieces and (right := text[i:]) in pieces
        ]
        pairs.sort(key=lambda pair: (pieces[pair[0]], pieces[pair[1]]))
        found += pairs

    def order(pair: tuple[str, str]) -> tuple[float, int, int]:
        left, right = pair
        return scores[pieces[left + right]], len(left), len(right)

    found.sort(key=order, reverse=True)
    return found


def _built(parts: Mapping[str, Any], model: models.BPE) -> Backend:
    """Returns a tokenizer of a model and of parts in the form of tokenizer.json."""
    import json

    empty = {"type": "BPE", "vocab": {}, "merges": []}
    state = {"version": "1.0", "added_tokens": [], **parts, "model": empty}
    backend = Backend.from_str(json.dumps(state))
    backend.model = model
    return backend


def _named(read: GgufMetadata, words: _Words) -> dict[str, str]:
    """Returns the texts of special tokens, by their names in tokenizer_config.json."""
    return {
        name: words.texts[read.integer(key, low=0, below=len(words.texts))]
        for name, short in _NAMES.items()
        if read.get(key := _PREFIX + short) is not None
    }


def _adds_bos(read: GgufMetadata, *, byte_level: bool) -> bool:
    default = True
    if byte_level:
        default = PRETOKENIZERS[read.text(f"{_PREFIX}pre")].add_bos
    return read.flag(f"{_PREFIX}add_bos_token", default=default)


def _add_ends(
    read: GgufMetadata, backend: Backend, named: Mapping[str, str], *, bos: bool
) -> None:
    """Make the tokenizer add the tokens to texts that the metadata say it adds."""
    eos = read.flag(f"{_PREFIX}add_eos_token", default=False)
    begin = [named["bos_token"]] if bos and "bos_token" in named else []
    end = [named["eos_token"]] if eos and "eos_token" in named else []
    if begin or end:
        ids = [(text, backend.token_to_id(text)) for text in {*begin, *end}]
        single, second = [*begin, "$A", *end], [*begin, "$B:1", *end]
        backend.post_processor = processors.TemplateProcessing(
            single, [*single, *second], ids
        )


def _templates(read: GgufMetadata) -> Templates:
    """Returns the chat templates of a file: the default one, and named ones."""
    found = dict(_named_templates(read))
    if read.get(_TEMPLATE) is not None:
        found["default"] = read.text(_TEMPLATE)
    names = tuple(sorted(found)) if len(found) > 1 else ()
    return Templates(found.get("default"), found.get("tool_use"), names)


def _named_templates(read: GgufMetadata) -> Iterator[tuple[str, str]]:
    listed = f"{_TEMPLATE}s"
    if read.get(listed) is not None:
        for name in read.array(listed).texts():
            yield name, read.text(f"{_TEMPLATE}.{name}")

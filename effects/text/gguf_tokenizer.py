"""The tokenizer in the metadata of a GGUF file, built of the `tokenizers` library.

Two kinds are read, by `tokenizer.ggml.model`. `gpt2` is byte-level BPE, with merges in
the file, and words that are divided as `tokenizer.ggml.pre` says. `llama` is
SentencePiece's BPE, with a score for each token: merges follow from scores, as
transformers makes them, and what is in no token is written in tokens of bytes.
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
from minfer.effects.models.gguf.metadata import Metadata
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
LONGEST: Final = 1024  # characters of a token: merges of a longer one are too many
_BLANK: Final = "▁"


@frozen(eq=False)
class _Words:
    """The tokens of a file, in the order of their ids."""

    texts: list[str]
    types: tuple[int, ...]

    def vocabulary(self) -> dict[str, int]:
        """Returns the ids of all tokens but those that only fill the vocabulary."""
        return {
            text: token
            for token, (text, kind) in enumerate(zip(self.texts, self.types, strict=True))
            if kind != UNUSED
        }

    def added(self) -> list[AddedToken]:
        """Returns the tokens that are found in texts before words are divided."""
        return [
            AddedToken(text, special=kind == CONTROL, normalized=False)
            for text, kind in zip(self.texts, self.types, strict=True)
            if kind in (CONTROL, USER_DEFINED) and text
        ]


def gguf_backend(path: Path) -> tuple[Backend, SpecialTokens, Templates]:
    """Returns the tokenizer of a file, the special tokens that it names, and its chat
    templates.

    Raises `GgufError` for damaged metadata, and `UnsupportedModelError` for other kinds
    of tokenizers.
    """
    read = Metadata(read_gguf(path))
    kind = read.text(f"{_PREFIX}model")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModelError(
            f"{path}: a tokenizer of model {kind!r:.100} is not supported; gpt2 and "
            f"llama are: give the Hugging Face checkpoint that the file was made from"
        )
    words = _read_words(read, gguf_config(path)["vocab_size"], byte_level=kind == "gpt2")
    named = _named(read, words)
    try:
        byte_level = kind == "gpt2"
        backend = _byte_level(read, words) if byte_level else _fallback(read, words)
        backend.add_tokens(words.added())
        _add_ends(read, backend, named, bos=_adds_bos(read, byte_level=byte_level))
    except (GgufError, UnsupportedModelError):
        raise
    except Exception as error:  # the library raises bare Exception for any fault
        what = f"its tokenizer cannot be built ({error}); convert the model again"
        raise GgufError(f"{path}: {what}") from error
    tokens = SpecialTokens(added=tuple(words.added()), named=named, extra=())
    return backend, tokens, _templates(read)


def _read_words(read: Metadata, rows: int, *, byte_level: bool) -> _Words:
    """Returns the tokens of a file, for embeddings with so many rows."""
    texts, types = read.array(TOKENS).texts(), token_types(read)
    if not texts or len(texts) > rows:
        raise read.error(TOKENS, f"an array of 1 to {rows} tokens, as of the embeddings")
    if not byte_level:  # converters write Gemma's runs of blanks as blanks
        texts = [text if text.strip(" ") else _BLANK * len(text) for text in texts]
    words = _Words(texts, types)
    if (longest := max(map(len, texts))) > LONGEST:
        raise read.error(TOKENS, f"texts of at most {LONGEST} characters, not {longest}")
    if len(words.vocabulary()) != len(texts) - types.count(UNUSED):
        raise read.error(TOKENS, "texts of which no two are equal")
    return words


def _byte_level(read: Metadata, words: _Words) -> Backend:
    name = read.text(f"{_PREFIX}pre", "")
    how = PRETOKENIZERS.get(name)
    if how is None:
        known = ", ".join(PRETOKENIZERS)
        raise UnsupportedModelError(
            f"{read.file.path}: {_PREFIX}pre {name!r:.100} is not supported; {known} "
            f"are: convert the model again with a current llama.cpp, or give the Hugging "
            f"Face checkpoint"
        )
    merges = []
    for i, text in enumerate(read.array(f"{_PREFIX}merges").texts()):
        left, blank, right = text.partition(" ")
        if not left or not right or not blank:
            raise read.error(f"{_PREFIX}merges", f"pairs of tokens; {i} is {text!r:.100}")
        merges.append((left, right))
    vocabulary = words.vocabulary()
    return _built(
        how.parts, models.BPE(vocabulary, merges, ignore_merges=how.ignore_merges)
    )


def _fallback(read: Metadata, words: _Words) -> Backend:
    """Returns SentencePiece's BPE. Raises `UnsupportedModelError` for normalizations."""
    key = f"{_PREFIX}remove_extra_whitespaces"
    if read.flag(key, default=False):
        what = f"a tokenizer with {key} is not supported"
        raise UnsupportedModelError(f"{read.file.path}: {what}")
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


def _merges(read: Metadata, words: _Words) -> list[tuple[str, str]]:
    """Returns the merges of SentencePiece's scores, in transformers' order."""
    key = f"{_PREFIX}scores"
    scores = read.array(key).numbers()
    if len(scores) != len(words.texts):
        raise read.error(key, f"an array of {len(words.texts)}, as {TOKENS}")
    if read.arch == "gemma3":  # whose runs of blanks have no scores in files
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
    """Returns a tokenizer of parts as tokenizer.json spells them, and a model."""
    import json

    empty = {"type": "BPE", "vocab": {}, "merges": []}
    state = {"version": "1.0", "added_tokens": [], **parts, "model": empty}
    backend = Backend.from_str(json.dumps(state))
    backend.model = model
    return backend


def _named(read: Metadata, words: _Words) -> dict[str, str]:
    """Returns the texts of the special tokens that the metadata name."""
    return {
        name: words.texts[read.whole(key, low=0, below=len(words.texts))]
        for name, short in _NAMES.items()
        if read.get(key := _PREFIX + short) is not None
    }


def _adds_bos(read: Metadata, *, byte_level: bool) -> bool:
    default = True
    if byte_level:
        default = PRETOKENIZERS[read.text(f"{_PREFIX}pre")].add_bos
    return read.flag(f"{_PREFIX}add_bos_token", default=default)


def _add_ends(
    read: Metadata, backend: Backend, named: Mapping[str, str], *, bos: bool
) -> None:
    """Have texts begin with `bos_token` and end with `eos_token` as the metadata say."""
    eos = read.flag(f"{_PREFIX}add_eos_token", default=False)
    begin = [named["bos_token"]] if bos and "bos_token" in named else []
    end = [named["eos_token"]] if eos and "eos_token" in named else []
    if begin or end:
        ids = [(text, backend.token_to_id(text)) for text in {*begin, *end}]
        single, second = [*begin, "$A", *end], [*begin, "$B:1", *end]
        backend.post_processor = processors.TemplateProcessing(
            single, [*single, *second], ids
        )


def _templates(read: Metadata) -> Templates:
    """Returns the chat templates of a file: the default one, and those with names."""
    found = dict(_named_templates(read))
    if read.get(_TEMPLATE) is not None:
        found["default"] = read.text(_TEMPLATE)
    names = tuple(sorted(found)) if len(found) > 1 else ()
    return Templates(found.get("default"), found.get("tool_use"), names)


def _named_templates(read: Metadata) -> Iterator[tuple[str, str]]:
    listed = f"{_TEMPLATE}s"
    if read.get(listed) is not None:
        for name in read.array(listed).texts():
            yield name, read.text(f"{_TEMPLATE}.{name}")

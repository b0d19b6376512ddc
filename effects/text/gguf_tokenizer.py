"""Builds the tokenizer in the metadata of a GGUF file, with the `tokenizers` library.

Three values of `tokenizer.ggml.model` are supported. `gpt2` is byte-level BPE: the file
has the merges, and `tokenizer.ggml.pre` names the pre-tokenizer. `llama` is
SentencePiece's BPE with byte fallback: the file has a score for each token, from which
merges are made as transformers makes them. `gemma4` is the same BPE with merges in the
file.
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
from minfer.effects.text.tokenizer_classes import CLASSES, State

_BYTE_LEVEL, _SCORED, _GEMMA4 = "gpt2", "llama", "gemma4"  # kinds of tokenizers
_KINDS: Final = (_BYTE_LEVEL, _SCORED, _GEMMA4)
_GEMMA: Final = ("gemma2", "gemma3")  # architectures
_PREFIX: Final = "tokenizer.ggml."
_SPECIAL_TOKEN_KEYS: Final = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # so spelled in files
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
}
_TEMPLATE: Final = "tokenizer.chat_template"
MAX_TOKEN_CHARS: Final = 1024  # a longer token has too many merges
_BLANK: Final = "▁"


@frozen(eq=False)
class _Vocabulary:
    """The tokens of a file, in the order of their ids."""

    texts: list[str]
    types: tuple[int, ...]

    def ids(self) -> dict[str, int]:
        """Returns the ids of all tokens but unused ones, by their texts."""
        return {
            text: token
            for token, (text, kind) in enumerate(zip(self.texts, self.types, strict=True))
            if kind != UNUSED
        }

    def added_tokens(self) -> list[AddedToken]:
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
    metadata = GgufMetadata(read_gguf(path))
    kind = metadata.text(f"{_PREFIX}model")
    if kind not in _KINDS:
        raise UnsupportedModelError(
            f"{path}: metadata {_PREFIX}model = {kind!r:.100} is not supported; "
            f"{', '.join(_KINDS)} are. Give the Hugging Face checkpoint that the file "
            f"was made from"
        )
    vocabulary = _read_vocabulary(metadata, gguf_config(path)["vocab_size"], kind)
    named = _special_token_texts(metadata, vocabulary)
    try:
        backend = (
            _byte_level(metadata, vocabulary)
            if kind == _BYTE_LEVEL
            else _gemma4(metadata, vocabulary, named.get("unk_token"))
            if kind == _GEMMA4
            else _sentencepiece(metadata, vocabulary)
        )
        backend.add_tokens(vocabulary.added_tokens())
        _add_post_processor(metadata, backend, named, bos=_adds_bos(metadata, kind))
    except (GgufError, UnsupportedModelError):
        raise
    except Exception as error:  # the library raises bare Exception for any fault
        fault = f"the tokenizer cannot be built ({error}); convert the model again"
        raise GgufError(f"{path}: {fault}") from error
    tokens = SpecialTokens(added=tuple(vocabulary.added_tokens()), named=named, extra=())
    return backend, tokens, _templates(metadata)


def _read_vocabulary(metadata: GgufMetadata, rows: int, kind: str) -> _Vocabulary:
    """Returns the tokens of a file whose matrix of embeddings has `rows` rows."""
    texts, types = metadata.array(TOKENS).texts(), token_types(metadata)
    if not texts or len(texts) > rows:
        raise metadata.error(
            TOKENS, f"an array of 1 to {rows} tokens, the rows of embeddings"
        )
    if kind == _SCORED:  # files have Gemma's runs of ▁ as runs of blanks
        texts = [text if text.strip(" ") else _BLANK * len(text) for text in texts]
    vocabulary = _Vocabulary(texts, types)
    if (longest := max(map(len, texts))) > MAX_TOKEN_CHARS:
        fault = (
            f"has a string of {longest} characters; at most {MAX_TOKEN_CHARS} are "
            f"supported"
        )
        raise metadata.fault(TOKENS, fault)
    if len(vocabulary.ids()) != len(texts) - types.count(UNUSED):
        raise metadata.fault(TOKENS, "has the same string twice")
    return vocabulary


def _byte_level(metadata: GgufMetadata, vocabulary: _Vocabulary) -> Backend:
    name = metadata.text(f"{_PREFIX}pre", "")
    pretokenizer = PRETOKENIZERS.get(name)
    if pretokenizer is None:
        supported = ", ".join(PRETOKENIZERS)
        raise UnsupportedModelError(
            f"{metadata.file.path}: metadata {_PREFIX}pre = {name!r:.100} is not "
            f"supported; {supported} are. Convert the model again with a current "
            f"llama.cpp, or give the Hugging Face checkpoint"
        )
    ignore_merges = pretokenizer.ignore_merges
    bpe = models.BPE(vocabulary.ids(), _merges(metadata), ignore_merges=ignore_merges)
    return _build_backend(pretokenizer.components, bpe)


def _merges(metadata: GgufMetadata) -> list[tuple[str, str]]:
    """Returns the merges in a file. Raises `GgufError`."""
    merges = []
    for i, text in enumerate(metadata.array(f"{_PREFIX}merges").texts()):
        left, blank, right = text.partition(" ")
        if not left or not right or not blank:
            fault = (
                f"has {text!r:.100} as element {i}, not two tokens and a blank between"
            )
            raise metadata.fault(f"{_PREFIX}merges", fault)
        merges.append((left, right))
    return merges


def _gemma4(
    metadata: GgufMetadata, vocabulary: _Vocabulary, unknown: str | None
) -> Backend:
    """Returns Gemma 4's tokenizer, whose parts are those of Gemma's class in
    transformers.
    """
    bpe = models.BPE(
        vocabulary.ids(),
        _merges(metadata),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    return _build_backend(CLASSES["GemmaTokenizer"].components({}), bpe)


def _sentencepiece(metadata: GgufMetadata, vocabulary: _Vocabulary) -> Backend:
    """Returns SentencePiece's BPE with byte fallback. Raises `UnsupportedModelError` if
    it normalizes white space.
    """
    key = f"{_PREFIX}remove_extra_whitespaces"
    if metadata.flag(key, default=False):
        raise UnsupportedModelError(
            f"{metadata.file.path}: metadata {key} = True is not supported; give the "
            f"Hugging Face checkpoint that the file was made from"
        )
    space_pattern = {"String": " "}
    replace = {"type": "Replace", "pattern": space_pattern, "content": _BLANK}
    prepend: list[State] = []
    strip: list[State] = []
    if metadata.flag(f"{_PREFIX}add_space_prefix", default=True):
        prepend = [{"type": "Prepend", "prepend": _BLANK}]
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    restore_blanks = {"type": "Replace", "pattern": {"String": _BLANK}, "content": " "}
    steps = [restore_blanks, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
    components = {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": steps},
    }
    unknown = vocabulary.types.index(UNKNOWN) if UNKNOWN in vocabulary.types else None
    bpe = models.BPE(
        vocabulary.ids(),
        _merges_by_score(metadata, vocabulary),
        unk_token=None if unknown is None else vocabulary.texts[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    return _build_backend(components, bpe)


def _merges_by_score(
    metadata: GgufMetadata, vocabulary: _Vocabulary
) -> list[tuple[str, str]]:
    """Returns the merges that follow from the scores, in transformers' order."""
    key = f"{_PREFIX}scores"
    scores = metadata.array(key).numbers()
    if len(scores) != len(vocabulary.texts):
        raise metadata.error(
            key, f"an array of {len(vocabulary.texts)} elements, as {TOKENS} is"
        )
    if metadata.arch in _GEMMA:  # files have no scores of their runs of blanks
        scores = tuple(range(0, -len(vocabulary.texts), -1))
    ids = {
        text: token
        for token, (text, kind) in enumerate(
            zip(vocabulary.texts, vocabulary.types, strict=True)
        )
        if kind in (NORMAL, USER_DEFINED)
    }
    merges: list[tuple[str, str]] = []
    for text in ids:
        pairs = [
            (left, right)
            for i in range(1, len(text))
            if (left := text[:i]) in ids and (right := text[i:]) in ids
        ]
        pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        merges += pairs

    def order(pair: tuple[str, str]) -> tuple[float, int, int]:
        left, right = pair
        return scores[ids[left + right]], len(left), len(right)

    merges.sort(key=order, reverse=True)
    return merges


def _build_backend(components: Mapping[str, Any], model: models.BPE) -> Backend:
    """Returns a tokenizer of a model and of parts in the form of tokenizer.json."""
    import json

    empty = {"type": "BPE", "vocab": {}, "merges": []}
    state = {"version": "1.0", "added_tokens": [], **components, "model": empty}
    backend = Backend.from_str(json.dumps(state))
    backend.model = model
    return backend


def _special_token_texts(
    metadata: GgufMetadata, vocabulary: _Vocabulary
) -> dict[str, str]:
    """Returns the texts of special tokens, by their names in tokenizer_config.json."""
    return {
        name: vocabulary.texts[metadata.integer(key, low=0, below=len(vocabulary.texts))]
        for name, short in _SPECIAL_TOKEN_KEYS.items()
        if metadata.get(key := _PREFIX + short) is not None
    }


def _adds_bos(metadata: GgufMetadata, kind: str) -> bool:
    if kind == _GEMMA4:  # whatever the file says, as in llama.cpp
        return True
    default = True
    if kind == _BYTE_LEVEL:
        default = PRETOKENIZERS[metadata.text(f"{_PREFIX}pre")].add_bos
    return metadata.flag(f"{_PREFIX}add_bos_token", default=default)


def _add_post_processor(
    metadata: GgufMetadata, backend: Backend, named: Mapping[str, str], *, bos: bool
) -> None:
    """Make the tokenizer add the tokens to texts that the metadata say it adds."""
    eos = metadata.flag(f"{_PREFIX}add_eos_token", default=False)
    begin = [named["bos_token"]] if bos and "bos_token" in named else []
    end = [named["eos_token"]] if eos and "eos_token" in named else []
    if begin or end:
        ids = [(text, backend.token_to_id(text)) for text in {*begin, *end}]
        single, second = [*begin, "$A", *end], [*begin, "$B:1", *end]
        backend.post_processor = processors.TemplateProcessing(
            single, [*single, *second], ids
        )


def _templates(metadata: GgufMetadata) -> Templates:
    """Returns the chat templates of a file: the default one, and named ones."""
    templates = dict(_named_templates(metadata))
    if metadata.get(_TEMPLATE) is not None:
        templates["default"] = metadata.text(_TEMPLATE)
    names = tuple(sorted(templates)) if len(templates) > 1 else ()
    return Templates(templates.get("default"), templates.get("tool_use"), names)


def _named_templates(metadata: GgufMetadata) -> Iterator[tuple[str, str]]:
    listed = f"{_TEMPLATE}s"
    if metadata.get(listed) is not None:
        for name in metadata.array(listed).texts():
            yield name, metadata.text(f"{_TEMPLATE}.{name}")

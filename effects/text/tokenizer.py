"""Text to token ids and back, as the checkpoint's tokenizer has it.

Uses the `tokenizers` library directly: transformers would take seconds to import. Token
ids agree with transformers' AutoTokenizer, including tokens that only
tokenizer_config.json names.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend

from minfer.effects.models.checkpoint import (
    CheckpointError,
    CorruptFileError,
    eos_ids,
    read_optional,
)
from minfer.effects.text.longest import longest_token, state_of

NAMED: Final = [
    f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
]
FLAGS: Final = (
    "single_word",
    "lstrip",
    "rstrip",
    "normalized",
    "special",
)  # of an added token
# GPT-2's printable stand-ins for bytes: character -> byte.
_PLAIN: Final = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHER: Final = [byte for byte in range(256) if byte not in _PLAIN]
_ALPHABET: Final = {chr(b): b for b in _PLAIN} | {
    chr(256 + i): b for i, b in enumerate(_OTHER)
}

_BYTE: Final = re.compile("<0x([0-9A-Fa-f]{2})>")  # how sentencepiece spells a byte


class TokenizerError(CheckpointError):
    """The tokenizer of a checkpoint is missing or unusable."""


class TextError(ValueError):
    """A text cannot be encoded."""


class TextTooLongError(TextError):
    """A text has more characters than the tokens of the context can stand for."""


class Tokenizer:
    """A checkpoint's tokenizer. Immutable after loading; safe to share between threads.

    A text that cannot fit into a `context` of so many tokens is refused unread. Raises
    `TokenizerError` if tokenizer.json is missing or corrupt, `CorruptFileError` for the
    small files beside it.
    """

    def __init__(self, folder: str | Path, context: int | None = None) -> None:
        folder = Path(folder)
        self._backend = backend = _load_backend(folder / "tokenizer.json")
        config = read_optional(folder / "tokenizer_config.json")
        older = read_optional(folder / "special_tokens_map.json")
        named = {name: _content(config.get(name, older.get(name))) for name in NAMED}
        self.special_tokens = {
            name: token for name, token in named.items() if token is not None
        }
        _add_tokens(backend, config, self.special_tokens)
        _set_template(backend, config, self.special_tokens)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.added_ids = frozenset(added)
        # Ids that end a sequence: of generation_config, config, and the tokenizer itself.
        own = backend.token_to_id(self.special_tokens.get("eos_token", ""))
        self.eos_ids = tuple(
            dict.fromkeys((*eos_ids(folder), *([] if own is None else [own])))
        )
        self.chat_template = _chat_template(folder, config)
        self.byte_level = (
            type(backend.decoder).__name__ == "ByteLevel"
        )  # tokens are plain bytes
        fallback = _falls_back(backend)
        # A text is what its tokens' bytes are in UTF-8, or that without a first blank.
        self.in_bytes = self.byte_level or fallback is not None
        self.strips = bool(fallback)
        self._bytes: dict[int, bytes] = {}  # of tokens that were looked up
        self._texts: dict[int, str | None] = {}  # likewise
        longest = longest_token(backend) if context else None
        # Characters of a text that may fit, if that is known.
        self.most = longest * context if longest and context else None
        self.context = context

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Raises `TextError` if it is not valid Unicode (lone
        surrogates), and `TextTooLongError`.
        """
        if self.most is not None and len(text) > self.most:
            raise TextTooLongError(
                f"the text has {len(text)} characters; this model's maximum context "
                f"length is {self.context} tokens, which hold {self.most} at most: "
                f"shorten it"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            why = (
                f"text has a lone surrogate at character {error.start}; remove it or "
                f"decode"
            )
            raise TextError(f"{why} the bytes it came from as UTF-8") from error
        # Of one text, but unlike `encode` it lets other threads run meanwhile.
        return self._backend.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )[0].ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence. Ids without a token (padded vocabularies) give no
        text.
        """
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def special(self, texts: Iterable[str]) -> frozenset[int]:
        """Ids of those of these texts that are special tokens."""
        found = map(self._backend.token_to_id, texts)
        return self.special_ids.intersection(one for one in found if one is not None)

    def added(self, text: str) -> int | None:
        """Id of the token that a text is by itself, special or not, if one was added."""
        found = self._backend.token_to_id(text)
        return found if found in self.added_ids else None

    def names(self, ids: Sequence[int]) -> list[str]:
        """Tokens as the vocabulary spells them; nothing for ids without a token."""
        return [self._backend.id_to_token(token) or "" for token in ids]

    def whole_text(self, token: int) -> str | None:
        """Text of one token, if it is that wherever a character may begin: not of parts
        of characters, nor where tokens are more than their bytes.
        """
        if token not in self._texts:
            try:
                text = self.token_bytes(token).decode() if self.in_bytes else None
            except UnicodeDecodeError:
                text = None
            self._texts[token] = text
        return self._texts[token]

    def as_json(self) -> str:
        """All of it as tokenizer.json has it, with what was added from other files."""
        return self._backend.to_str()

    def token_bytes(self, token: int) -> bytes:
        """Bytes of one token, as behind another; none for ids without a token."""
        if token in self._bytes:
            return self._bytes[token]
        name = self._backend.id_to_token(token) or ""
        if self.in_bytes and not self.byte_level and (byte := _BYTE.fullmatch(name)):
            self._bytes[token] = bytes.fromhex(byte[1])
        elif not self.byte_level:
            once, twice = (
                self.decode([token] * n, skip_special_tokens=False) for n in (1, 2)
            )
            self._bytes[token] = twice[len(once) :].encode()
        else:
            try:
                self._bytes[token] = bytes(_ALPHABET[char] for char in name)
            except KeyError:  # an added token in plain text
                self._bytes[token] = name.encode()
        return self._bytes[token]


def _load_backend(path: Path) -> Backend:
    try:
        backend = Backend.from_file(str(path))
    except (
        Exception
    ) as error:  # the library raises bare Exception for any fault of the file
        why = (
            f"corrupt or of an unknown kind ({error})" if path.is_file() else "not found"
        )
        remedy = "AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
        raise TokenizerError(
            f"{path}: {why}; write it with transformers: {remedy}"
        ) from error
    backend.no_padding()
    backend.no_truncation()
    return backend


def _falls_back(backend: Backend) -> int | None:
    """Blanks that a text loses at its beginning, where tokens are sentencepiece's: blanks
    as ▁, and bytes for what is in no other token. None for other kinds.
    """
    parts = state_of(backend.decoder).get("decoders", ())
    kinds = [part["type"] for part in parts]
    strip = parts[-1] if kinds[-1:] == ["Strip"] else None
    if kinds[: len(kinds) - bool(strip)] != ["Replace", "ByteFallback", "Fuse"]:
        return None
    if strip is None:
        return 0
    usual = strip["content"] == " " and strip["stop"] == 0 and strip["start"] <= 1
    return int(strip["start"]) if usual else None


def _content(token: object) -> str | None:
    """A token's text: configs write either the text or an object that holds it."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


def _add_tokens(
    backend: Backend, config: Mapping[str, Any], named: Mapping[str, str]
) -> None:
    """Add, as transformers does, the tokens that only tokenizer_config.json knows."""
    wanted: dict[str, AddedToken] = {}
    listed = config.get("added_tokens_decoder")
    by_id = listed.items() if isinstance(listed, dict) else ()
    for _, entry in sorted(
        by_id, key=lambda one: int(one[0]) if one[0].isdecimal() else -1
    ):
        if isinstance(entry, dict) and (content := _content(entry)) is not None:
            flags = {flag: bool(entry[flag]) for flag in FLAGS if flag in entry}
            wanted[content] = AddedToken(content, **flags)
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    values = (
        extra.values()
        if isinstance(extra, dict)
        else extra
        if isinstance(extra, list)
        else ()
    )
    for content in [*named.values(), *map(_content, values)]:
        if content is not None:
            wanted.setdefault(content, AddedToken(content, special=True))
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens(
        [token for content, token in wanted.items() if content not in known]
    )


def _set_template(
    backend: Backend, config: Mapping[str, Any], named: Mapping[str, str]
) -> None:
    """Begin and end tokens as the config says, where it says or
    tokenizer.json does not.
    """
    stated = "add_bos_token" in config or "add_eos_token" in config
    if not stated and backend.post_processor is not None:
        return
    bos = named.get("bos_token") if config.get("add_bos_token") else None
    eos = named.get("eos_token") if config.get("add_eos_token") else None
    single = [f"{bos}:0"] * bool(bos) + ["$A:0"] + [f"{eos}:0"] * bool(eos)
    special = [(token, backend.token_to_id(token)) for token in (bos, eos) if token]
    backend.post_processor = processors.TemplateProcessing(
        single=single, pair=[*single, "$B:1"], special_tokens=special
    )


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    try:
        if path.is_file():
            return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise CorruptFileError(
            f"{path}: cannot be read ({error}); download it again"
        ) from error
    template = config.get("chat_template")
    if isinstance(
        template, list
    ):  # several by name: [{"name": ..., "template": ...}, ...]
        named = {
            t.get("name"): t.get("template") for t in template if isinstance(t, dict)
        }
        template = named.get("default")
    return template if isinstance(template, str) else None

"""Text in and text out: the tokenizer, streaming detokenization, and stop strings.

Uses the `tokenizers` library directly: transformers would take seconds to import. Token ids agree
with transformers' AutoTokenizer, including tokens that only tokenizer_config.json names.
"""

import codecs
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend

from minfer.effects.checkpoint import (
    CheckpointError,
    CorruptFileError,
    eos_ids,
    read_optional,
)

NAMED: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# Tokens that a detokenizer without byte-level decoding may hold back: a character has 4 bytes.
HELD: Final = 4
SEEN: Final = 8  # tokens without text of their own that it keeps as context


class TokenizerError(CheckpointError):
    """The tokenizer of a checkpoint is missing or unusable."""


class TextError(ValueError):
    """A text cannot be encoded."""


class Tokenizer:
    """A checkpoint's tokenizer. Immutable after loading; safe to share between threads."""

    def __init__(self, folder: str | Path) -> None:
        """Read tokenizer.json and the small files beside it.

        Raises `TokenizerError` if tokenizer.json is missing or corrupt, `CorruptFileError` for the
        files beside it.
        """
        folder = Path(folder)
        self._backend = _load_backend(folder / "tokenizer.json")
        config = read_optional(folder / "tokenizer_config.json")
        self.special_tokens: dict[str, str] = _named_tokens(config, folder)
        _add_tokens(self._backend, config, self.special_tokens)
        _set_template(self._backend, config, self.special_tokens)
        added = self._backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(i for i, t in added.items() if t.special)
        self.vocab_size: int = self._backend.get_vocab_size()
        self.eos_ids: tuple[int, ...] = self._eos_ids(folder)
        self.bos_id: int | None = self._id(self.special_tokens.get("bos_token"))
        self.chat_template: str | None = _chat_template(folder, config)
        self._bytes: dict[int, bytes] | None = {} if _is_byte_level(self._backend) else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the tokenizer's own begin and end tokens if it has such.

        Raises `TextError` for text that is not valid Unicode (lone surrogates).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TextError(
                f"text has a lone surrogate at character {error.start}; remove it or "
                "decode the bytes it came from as UTF-8"
            ) from error
        # Of one text, but unlike `encode` it lets other threads run meanwhile.
        found = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = found[0].ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence. Ids without a token (padded vocabularies) give no text."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token: int) -> bytes | None:
        """Bytes of one token; None if this tokenizer's tokens are not plain bytes."""
        if self._bytes is None:
            return None
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = _token_bytes(self._backend.id_to_token(token))
        return found

    def detokenizer(self, *, skip_special_tokens: bool = True) -> "Detokenizer":
        """A `Detokenizer` for one sequence."""
        return Detokenizer(self, skip_special_tokens=skip_special_tokens)

    def _id(self, token: str | None) -> int | None:
        found: int | None = None if token is None else self._backend.token_to_id(token)
        return found

    def _eos_ids(self, folder: Path) -> tuple[int, ...]:
        """Ids that end a sequence: of generation_config, config, and the tokenizer itself."""
        own = self._id(self.special_tokens.get("eos_token"))
        return tuple(dict.fromkeys((*eos_ids(folder), *(() if own is None else (own,)))))


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint folder. Raises as `Tokenizer` does."""
    return Tokenizer(folder)


class Detokenizer:
    """Text of a growing sequence, piece by piece, in time linear in its length.

    The pieces join to `Tokenizer.decode` of all ids and never end inside a character. A tokenizer
    that is not byte-level is decoded in a small window; there, sequences that are not valid UTF-8
    may come out with another number of replacement characters.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        # Replaces exactly as Rust's from_utf8_lossy does: one mark for each maximal broken part.
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._seen: list[int] = []
        self._held: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        """Take tokens; return the text that is certain now."""
        kept = [token for token in ids if token not in self._skip]
        pieces = [self._tokenizer.token_bytes(token) for token in kept]
        if None not in pieces:
            return self._utf8.decode(b"".join(piece for piece in pieces if piece is not None))
        return "".join(self._window(token) for token in kept)

    def flush(self) -> str:
        """The rest, at the end of the sequence: an unfinished character becomes U+FFFD."""
        return self._utf8.decode(b"", True) + self._emit()

    def _window(self, token: int) -> str:
        self._held.append(token)
        text = self._tokenizer.decode(self._seen + self._held, skip_special_tokens=False)
        return "" if text.endswith("�") and len(self._held) < HELD else self._emit()

    def _emit(self) -> str:
        if not self._held:
            return ""
        before = self._tokenizer.decode(self._seen, skip_special_tokens=False)
        after = self._tokenizer.decode(self._seen + self._held, skip_special_tokens=False)
        # What was emitted begins at a character's first byte, so it can stand as context alone.
        self._seen = self._held if after != before else (self._seen + self._held)[-SEEN:]
        self._held = []
        return after[len(before) :]


class StopMatcher:
    """Finds the stop string that ends first in a text that comes in pieces.

    Of several that end at the same character, the longest. The result does not depend on how the
    text is cut into pieces. Text that may turn out to begin a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises ValueError for an empty stop string, which would end every text at once."""
        if not all(stops):
            raise ValueError("a stop string must not be empty; remove it from the list")
        self._stops = tuple(dict.fromkeys(stops))
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        """Take text; return (text that is certain, the stop string found or None).

        After a find, the text before the stop string has been returned and the rest is dropped.
        """
        text = self._held + piece
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, stop = min(found)
            self._held = ""
            return text[:at], stop
        keep = len(text) - self._undecided(text)
        self._held = text[keep:]
        return text[:keep], None

    def flush(self) -> str:
        """The text held back, at the end of the sequence."""
        held, self._held = self._held, ""
        return held

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-size:]
            if any(stop.startswith(end) for stop in self._stops):
                return size
        return 0


def _load_backend(path: Path) -> Backend:
    if not path.is_file():
        raise TokenizerError(
            f"{path}: not found; write it with transformers: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
        )
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for any fault of the file
        raise TokenizerError(
            f"{path}: corrupt or of an unknown kind ({error}); write it again with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
        ) from error
    backend.no_padding()
    backend.no_truncation()
    return backend


def _content(token: object) -> str | None:
    """A token's text: configs write either the text or an object that holds it."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


def _named_tokens(config: Mapping[str, Any], folder: Path) -> dict[str, str]:
    older = read_optional(folder / "special_tokens_map.json")
    found = {name: _content(config.get(name, older.get(name))) for name in NAMED}
    return {name: content for name, content in found.items() if content is not None}


def _add_tokens(backend: Backend, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Add, as transformers does, the tokens that only tokenizer_config.json knows."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    wanted: dict[str, AddedToken] = {}
    listed = config.get("added_tokens_decoder")
    for _, entry in sorted(
        (listed if isinstance(listed, dict) else {}).items(),
        key=lambda item: int(item[0]) if str(item[0]).isdigit() else -1,
    ):
        content = _content(entry)
        if content is not None and isinstance(entry, dict):
            flags = {
                k: bool(v)
                for k, v in entry.items()
                if k in ("single_word", "lstrip", "rstrip", "normalized", "special")
            }
            wanted[content] = AddedToken(content, **flags)
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    values = extra.values() if isinstance(extra, dict) else extra if isinstance(extra, list) else ()
    for content in [*named.values(), *map(_content, values)]:
        if content is not None:
            wanted.setdefault(content, AddedToken(content, special=True))
    backend.add_tokens([token for content, token in wanted.items() if content not in known])


def _set_template(backend: Backend, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Begin and end tokens as the config says, where it says or tokenizer.json does not."""
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
    if path.is_file():
        try:
            return path.read_text("utf-8")
        except (OSError, ValueError) as error:
            raise CorruptFileError(
                f"{path}: cannot be read ({error}); download it again"
            ) from error
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name: [{"name": ..., "template": ...}, ...]
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _is_byte_level(backend: Backend) -> bool:
    return type(backend.decoder).__name__ == "ByteLevel"


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: character -> byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(other)}


_ALPHABET: Final = _byte_alphabet()


def _token_bytes(token: str | None) -> bytes:
    if token is None:
        return b""
    try:
        return bytes(_ALPHABET[char] for char in token)
    except KeyError:  # an added token in plain text
        return token.encode()

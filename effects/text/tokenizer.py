"""Text to token ids and back, by the checkpoint's tokenizer.

Uses the `tokenizers` library directly: transformers would take seconds to import. Token
ids agree with those of transformers' AutoTokenizer on the same files.
"""

import copy
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer as Backend

from minfer.effects.models.checkpoint.checkpoint import eos_ids
from minfer.effects.models.gguf.container import is_gguf
from minfer.effects.text.longest_token import component_state, max_token_chars
from minfer.effects.text.side_files import Templates, read_response_template
from minfer.effects.text.tokenizer_loading import TokenizerError as TokenizerError
from minfer.effects.text.tokenizer_loading import load_backend

# GPT-2's printable stand-ins for bytes: character -> byte.
_PRINTABLE: Final = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_REMAPPED: Final = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF_CHAR: Final = {chr(b): b for b in _PRINTABLE} | {
    chr(256 + i): b for i, b in enumerate(_REMAPPED)
}

_BYTE: Final = re.compile("<0x([0-9A-Fa-f]{2})>")  # sentencepiece's form of a byte


class TextError(ValueError):
    """A text cannot be encoded."""


class TextTooLongError(TextError):
    """A text has more characters than the tokens of the context can stand for."""


class Tokenizer:
    """A checkpoint's tokenizer. Immutable after loading; safe to share between threads.

    A text that cannot fit into `context` tokens is refused unread. Raises
    `TokenizerError` if tokenizer.json is missing or corrupt, `CorruptFileError` for the
    small files beside it.
    """

    def __init__(self, folder: str | Path, context: int | None = None) -> None:
        folder = Path(folder)
        backend, tokens, self.templates = load_backend(folder)
        self._backend = backend
        self.special_tokens = tokens.texts
        added_tokens = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(
            token for token in added_tokens if _is_skipped(backend, token)
        )
        self.added_ids = frozenset(added_tokens)
        # Ids that end a sequence: of generation_config, config, and the tokenizer itself.
        eos_id = backend.token_to_id(self.special_tokens.get("eos_token", ""))
        self.eos_ids = tuple(
            dict.fromkeys((*eos_ids(folder), *([] if eos_id is None else [eos_id])))
        )
        self.chat_template = self.templates.plain
        # How answers are parsed, as JSON; empty if the checkpoint does not say.
        self.response_template = "" if is_gguf(folder) else read_response_template(folder)
        self.byte_level = (
            type(backend.decoder).__name__ == "ByteLevel"
        )  # tokens are plain bytes
        fallback = _num_stripped_blanks(backend)
        # A text is what its tokens' bytes are in UTF-8, or that without a first blank.
        self.in_bytes = self.byte_level or fallback is not None
        self.strips = bool(fallback)
        self._bytes: dict[int, bytes] = {}  # of tokens that were looked up
        self._texts: dict[int, str | None] = {}  # likewise
        max_chars_per_token = max_token_chars(backend) if context else None
        # The most characters of a text that may fit, if known.
        self.max_chars = (
            max_chars_per_token * context if max_chars_per_token and context else None
        )
        self.context = context

    @property
    def all_templates(self) -> str | None:
        """The texts of all chat templates of conversations."""
        used = [self.chat_template, self.templates.with_tools]
        return "\n".join(text for text in used if text is not None) or None

    def with_template(self, template: str) -> "Tokenizer":
        """This tokenizer with another chat template in place of all of its own."""
        changed = copy.copy(self)
        changed.templates = Templates(template)
        changed.chat_template = template
        return changed

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Raises `TextError` if it is not valid Unicode (lone
        surrogates), and `TextTooLongError`.
        """
        if self.max_chars is not None and len(text) > self.max_chars:
            raise TextTooLongError(
                f"the text has {len(text)} characters; this model's maximum context "
                f"length is {self.context} tokens, which hold {self.max_chars} at most: "
                f"shorten it"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            reason = (
                f"text has a lone surrogate at character {error.start}; remove it or "
                f"decode"
            )
            raise TextError(f"{reason} the bytes it came from as UTF-8") from error
        try:
            # Of one text, but unlike `encode` it lets other threads run meanwhile.
            return self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )[0].ids
        except Exception as error:  # as for an unknown token that is no token
            raise TextError(f"the tokenizer cannot encode the text: {error}") from error

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence. Ids without a token (padded vocabularies) give no
        text.
        """
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def find_special_ids(self, texts: Iterable[str]) -> frozenset[int]:
        """Ids of those of these texts that are special tokens."""
        ids = map(self._backend.token_to_id, texts)
        return self.special_ids.intersection(token for token in ids if token is not None)

    def added_token_id(self, text: str) -> int | None:
        """The id of the added token with this text, special or not, if there is one."""
        token = self._backend.token_to_id(text)
        return token if token in self.added_ids else None

    def token_names(self, ids: Sequence[int]) -> list[str]:
        """Tokens in the vocabulary's spelling; empty for ids without a token."""
        return [self._backend.id_to_token(token) or "" for token in ids]

    def whole_text(self, token: int) -> str | None:
        """The text of one token, if it is the same wherever a character may begin: not
        for parts of characters, nor where tokens are more than their bytes.
        """
        if token not in self._texts:
            try:
                text = self.token_bytes(token).decode() if self.in_bytes else None
            except UnicodeDecodeError:
                text = None
            self._texts[token] = text
        return self._texts[token]

    @property
    def largest_id(self) -> int:
        """The largest id of a token."""
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        return max(vocabulary.values(), default=0)

    def as_json(self) -> str:
        """The whole tokenizer as a tokenizer.json, with tokens of other files."""
        return self._backend.to_str()

    def token_bytes(self, token: int) -> bytes:
        """Bytes of one token, as after another; none for ids without a token."""
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
                self._bytes[token] = bytes(_BYTE_OF_CHAR[char] for char in name)
            except KeyError:  # an added token in plain text
                self._bytes[token] = name.encode()
        return self._bytes[token]


def _is_skipped(backend: Backend, token: int) -> bool:
    """Whether `decode` leaves out an added token as special. Its flags do not show that:
    the library compares texts, and one that was ever special stays so.
    """
    ids = [token] * 3  # a decoder may strip the first
    shown, skipped = (
        backend.decode(ids, skip_special_tokens=skip) for skip in (False, True)
    )
    return shown != skipped


def _num_stripped_blanks(backend: Backend) -> int | None:
    """Blanks that a text loses at its beginning, where tokens are sentencepiece's: blanks
    as ▁, and bytes for what is in no other token. None for other kinds.
    """
    steps = component_state(backend.decoder).get("decoders", ())
    kinds = [step["type"] for step in steps]
    strip = steps[-1] if kinds[-1:] == ["Strip"] else None
    if kinds[: len(kinds) - bool(strip)] != ["Replace", "ByteFallback", "Fuse"]:
        return None
    if strip is None:
        return 0
    is_usual = strip["content"] == " " and strip["stop"] == 0 and strip["start"] <= 1
    return int(strip["start"]) if is_usual else None

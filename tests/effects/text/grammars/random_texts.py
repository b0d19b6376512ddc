"""Random values that a schema allows, byte by byte."""

import json
import re
from functools import cache, lru_cache
from random import Random
from typing import Any, Final

from attrs import define, frozen
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from minfer.effects.text.grammars.grammar_library import Matcher
from minfer.effects.text.grammars.llguidance_compiler import LlguidanceCompiler
from minfer.sampling.structured import StructuredOutputs

MAX_BYTES: Final = 4000
SHORT: Final = 40  # bytes, from which on values are closed
_CLOSING: Final = b'"}]'
_OPENING: Final = b",[{ \n\r\t"
_IN_TEXT: Final = re.compile(
    rb'(?:[^"]++|"(?:[^"\\]++|\\.)*+")*+"(?:[^"\\]++|\\.)*+', re.DOTALL
)
_DIGITS: Final = b"0123456789"
_LARGE_EXPONENT: Final = re.compile(rb"[0-9][eE][+-]?[0-9]{2}\Z")


@cache
def compiler() -> LlguidanceCompiler:
    """The compiler of a vocabulary of the 256 bytes, and an end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: number for number, text in enumerate([*alphabet, "<end>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return LlguidanceCompiler(tokenizer.to_str(), 257, [256])


@cache
def _byte_of() -> dict[int, int]:
    """The byte of each token, as GPT-2 shows them."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unshown_bytes = [byte for byte in range(256) if byte not in shown]
    written = {chr(byte): byte for byte in shown}
    written |= {chr(256 + place): byte for place, byte in enumerate(unshown_bytes)}
    return {place: written[text] for place, text in enumerate(sorted(written))}


@cache
def _tokens() -> dict[int, int]:
    return {byte: token for token, byte in _byte_of().items()}


def token_of(byte: int) -> int:
    """The token of a byte."""
    return _tokens()[byte]


def matcher(schema: Any) -> Matcher:
    """A matcher of a schema."""
    return compiler().compile(StructuredOutputs(json=schema)).matcher()


@frozen
class _Allowed:
    """The bytes that may come next."""

    every: tuple[int, ...]
    close: tuple[int, ...]  # that close a value
    plain: tuple[int, ...]  # of ASCII
    short: tuple[int, ...]  # of these, that begin nothing


@lru_cache(maxsize=65_536)
def allowed_bytes(mask: bytes) -> _Allowed:
    """The bytes that a mask allows."""
    bits = int.from_bytes(mask, "little")
    all_allowed = [byte for token, byte in _byte_of().items() if bits >> token & 1]
    close = [byte for byte in all_allowed if byte in _CLOSING]
    plain = [byte for byte in all_allowed if byte < 128 and byte != ord("\\")]
    short = [byte for byte in plain if byte not in _OPENING]
    return _Allowed(*map(tuple, (all_allowed, close, plain, short or plain)))


@define
class Sampler:
    """Draws values that a matcher allows, of which numbers are finite in 64 bits."""

    walk: Matcher
    random: Random
    hint: bytes = b""  # what a text must have within it, if that is hard to guess

    def value(self) -> Any:
        """A value."""
        self.walk.restart()
        text = bytearray()
        while not self.walk.must_end:
            allowed = allowed_bytes(self.walk.mask())
            closing = len(text) > SHORT
            if self.walk.may_end and (closing or self.random.random() < 0.3):
                break
            byte = self._choice(allowed, text, closing=closing)
            text.append(byte)
            self.walk.advance([token_of(byte)])
            assert len(text) < MAX_BYTES, bytes(text)
        return json.loads(text)

    def _choice(self, allowed: _Allowed, text: bytearray, *, closing: bool) -> int:
        """One of these bytes: more often one that closes a value, and is ASCII."""
        random = self.random
        close = allowed.close
        if _IN_TEXT.fullmatch(text):
            ended = ord('"') in close and (not self.hint or self.hint in text)
            close = (ord('"'),) if ended else ()
        if close and random.random() < (0.9 if closing else 0.15):
            return random.choice(close)
        if closing and (hinted := self._hinted(text)) in allowed.every:
            return hinted
        plain = allowed.short if closing else allowed.plain
        if _LARGE_EXPONENT.search(text):
            ends = [byte for byte in plain if byte not in _DIGITS]
            return random.choice(
                ends or [byte for byte in allowed.plain if byte not in _DIGITS]
            )
        return random.choice(plain if plain and random.random() < 0.98 else allowed.every)

    def _hinted(self, text: bytearray) -> int | None:
        """The next byte of the hint."""
        for size in range(len(self.hint) - 1, -1, -1):
            if text.endswith(self.hint[:size]):
                return self.hint[size]
        return None

"""From token ids back to text, piece by piece, while a sequence grows.

A token is a run of bytes, and a character may take several tokens: what is not yet a
whole character is held back until the rest of it comes, or the sequence ends. With a
byte-level tokenizer that is UTF-8's own incremental decoding. Others (sentencepiece's
kind) spell a token differently at the beginning of a text, so a small window of tokens is
decoded twice, without and with what is new, and the difference is the text.
"""

import codecs
from collections.abc import Iterable
from typing import Final

from minfer.effects.text.tokenizer import Tokenizer

# Tokens that a detokenizer without byte-level decoding may hold back: a character has 4
# bytes.
HELD: Final = 4
SEEN: Final = 8  # tokens without text of their own that it keeps as context


class Detokenizer:
    """Text of a growing sequence, piece by piece, in time linear in its length.

    The pieces join to `Tokenizer.decode` of all ids and never end inside a character. A
    tokenizer that is not byte-level is decoded in a small window; there, sequences that
    are not valid UTF-8 may come out with another number of replacement characters.

    Special tokens are left out, but for those that are `shown`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self.tokenizer = tokenizer
        skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._skip = skipped - shown
        # Replaces exactly as Rust's from_utf8_lossy does: one mark for each maximal
        # broken part.
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._seen: list[int] = []
        self._held: list[int] = []

    def push(self, ids: Iterable[int], *, final: bool = False) -> str:
        """Take tokens; return the text that is certain now: with `final` all, mended by
        U+FFFD.
        """
        kept = [token for token in ids if token not in self._skip]
        if self.tokenizer.byte_level:
            return self._utf8.decode(
                b"".join(map(self.tokenizer.token_bytes, kept)), final
            )
        text = "".join(self._window([token]) for token in kept)
        return text + self._window([], final=True) if final else text

    def _window(self, tokens: list[int], *, final: bool = False) -> str:
        self._held += tokens
        before = self.tokenizer.decode(self._seen, skip_special_tokens=False)
        after = self.tokenizer.decode(self._seen + self._held, skip_special_tokens=False)
        if not final and after.endswith("�") and len(self._held) < HELD:
            return ""
        # What was emitted begins at a character's first byte, so it can stand as context
        # alone.
        self._seen = self._held if after != before else (self._seen + self._held)[-SEEN:]
        self._held = []
        return after[len(before) :]

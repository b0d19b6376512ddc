"""From token ids to text, incrementally, while a sequence grows.

A token is a run of bytes, and a character may take several tokens: an incomplete
character is kept until the rest of it comes, or the sequence ends. With a byte-level
tokenizer, and with sentencepiece's kind that falls back to bytes, that is UTF-8's own
incremental decoding. Others may decode a token differently at the beginning of a text, so
a small window of tokens is decoded twice, without and with the new tokens, and the
difference is the text.
"""

import codecs
from collections.abc import Iterable
from typing import Final

from minfer.effects.text.tokenizer import Tokenizer

# Tokens that may wait where a window is decoded: a character has 4 bytes.
MAX_HELD_TOKENS: Final = 4
NUM_CONTEXT_TOKENS: Final = 8  # tokens without text of their own that it keeps as context


class Detokenizer:
    """Text of a growing sequence, piece by piece, in time linear in its length.

    The pieces join to the text of all tokens' bytes, which is `Tokenizer.decode` of them,
    and never end inside a character. Bytes that are not UTF-8 become U+FFFD, one for each
    broken part; `decode` of a tokenizer that falls back to bytes gives up all characters
    that such bytes stand beside.

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
        # Whether the next token decodes to its usual text: not inside a character, nor at
        # the beginning of a text that loses a blank there.
        self._leading = tokenizer.strips
        self._decodes_plainly = not tokenizer.strips
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, ids: Iterable[int], *, final: bool = False) -> str:
        """Add tokens; return the text that is certain now: with `final` all, broken
        characters as U+FFFD.
        """
        tokens = [token for token in ids if token not in self._skip]
        if self.tokenizer.in_bytes:
            data = b"".join(map(self.tokenizer.token_bytes, tokens))
            text = self._utf8.decode(data, final)
            if self._leading and text:
                self._leading, text = False, text.removeprefix(" ")
            self._decodes_plainly = not self._leading and not self._utf8.getstate()[0]
            return text
        text = "".join(self._decode_window([token]) for token in tokens)
        return text + self._decode_window([], final=True) if final else text

    def push_token(self, token: int) -> str:
        """As `push`, for one token: most are whole characters, and looked up."""
        if self._decodes_plainly and token not in self._skip:
            text = self.tokenizer.whole_text(token)
            if text is not None:
                return text
        return self.push((token,))

    def _decode_window(self, tokens: list[int], *, final: bool = False) -> str:
        self._pending += tokens
        before = self.tokenizer.decode(self._context, skip_special_tokens=False)
        after = self.tokenizer.decode(
            self._context + self._pending, skip_special_tokens=False
        )
        if not final and after.endswith("�") and len(self._pending) < MAX_HELD_TOKENS:
            return ""
        # The emitted text begins at a character's first byte, so it can be context by
        # itself.
        self._context = (
            self._pending
            if after != before
            else (self._context + self._pending)[-NUM_CONTEXT_TOKENS:]
        )
        self._pending = []
        return after[len(before) :]

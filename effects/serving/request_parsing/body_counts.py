"""Counts of a body's contents while it is received: a body that can no longer be valid is
refused before the rest is received, let alone parsed.

Theory. Items of lists and objects are separated by commas, and texts may contain commas:
each list or object holds at most a context of ids, or `MAX_LIST_ITEMS`; each string holds
at most a text, and whatever is outside of strings is short. So the commas, brackets and
quotes so far bound everything else so far, and later parts cannot reduce them. Every
bound is generous: each body that could be valid passes, and the parser checks it exactly.

One pass over a part leaves the four kinds of bytes that count, of which there are few:
0.6 ms for a megabyte, in parts of at most 0.2, between which other tasks run.
"""

from typing import Final

from attrs import define, field

from minfer.effects.live.errors import far_too_long
from minfer.effects.serving.client_errors import ApiError

MAX_LIST_ITEMS: Final = 4096  # of lists that are no token ids: messages, parts, prompts
MAX_CONTAINERS: Final = 16 * MAX_LIST_ITEMS  # lists and objects of a body
MAX_CHAR_BYTES: Final = len(rb"\ud83d\ude00")  # of a character, at most
MAX_VALUE_BYTES: Final = 64  # of a number, `false` or the like, with its comma
SLACK_BYTES: Final = 2**16  # of names, and of white space
_COUNTED_BYTES: Final = b',[{"'
_UNCOUNTED_BYTES: Final = bytes(sorted(set(range(256)) - set(_COUNTED_BYTES)))


@define
class BodyCounter:
    """The counts of one body. `text`: characters of its longest string that fits."""

    context: int  # tokens
    text: int
    size: int = field(default=0, init=False)  # bytes
    commas: int = field(default=0, init=False)
    containers: int = field(default=0, init=False)
    quotes: int = field(default=0, init=False)

    def add(self, chunk: bytes) -> None:
        """Count a part. Raises TooLongError or ApiError if no valid body begins like
        this.
        """
        counted = chunk.translate(None, _UNCOUNTED_BYTES)
        self.size += len(chunk)
        self.commas += counted.count(b",")
        self.containers += counted.count(b"[") + counted.count(b"{")
        self.quotes += counted.count(b'"')
        self._check()

    def _check(self) -> None:
        strings = self.quotes // 2 + 1
        max_commas = (
            self.containers * max(self.context, MAX_LIST_ITEMS) + strings * self.text
        )
        if self.commas > max_commas:
            raise far_too_long(self.context)
        if self.containers > MAX_CONTAINERS:
            reason = f"the body has more than {MAX_CONTAINERS} lists and objects"
            raise ApiError(f"{reason}; leave some out")
        values = (self.commas + self.containers) * MAX_VALUE_BYTES
        if self.size > strings * self.text * MAX_CHAR_BYTES + values + SLACK_BYTES:
            raise far_too_long(self.context)

"""Which backend made a response: a stored response, and the record of its request, are
on that server alone.

An answer's id is in its header `x-request-id`, or the first "id" of its body.
"""

import re
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from attrs import define, field

MAX_REMEMBERED_IDS: Final = 2**16
_SEARCHED_BYTES: Final = 4096  # of a body
_ID: Final = re.compile(rb'"id"\s*:\s*"([\w.-]{1,128})"')
_ID_HEADER: Final = b"x-request-id"
_MAX_ID_CHARS: Final = 128


@define
class Homes:
    """The backends of the last answers, by their ids."""

    _names: OrderedDict[str, str] = field(factory=OrderedDict, init=False)

    def note(
        self, name: str, headers: Iterable[tuple[bytes, bytes]], first_chunk: bytes
    ) -> None:
        """Note an answer of a backend by its head and the first part of its body."""
        ids = [value for key, value in headers if key == _ID_HEADER]
        match = _ID.search(first_chunk, 0, _SEARCHED_BYTES)
        for key in (*ids, *(() if match is None else (match[1],))):
            if len(key) <= _MAX_ID_CHARS:
                self._names[key.decode("latin-1")] = name
                self._names.move_to_end(key.decode("latin-1"))
        while len(self._names) > MAX_REMEMBERED_IDS:
            self._names.popitem(last=False)

    def find(self, key: str) -> str | None:
        """The backend that made an answer, if it is known."""
        return self._names.get(key)

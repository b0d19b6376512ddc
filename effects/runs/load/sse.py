"""Server-sent events, read as they come: bytes in any pieces, whole events out.

An event is its `data:` lines, joined, up to an empty line. Comments, names of events and
unknown fields are passed over, as the standard has it. Lines may end with CR LF.

https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from typing import Final

from minfer.effects.runs.load.http import HttpError

LONGEST: Final = 2**24  # bytes of a line: more is no event


class EventReader:
    """Reads one stream."""

    def __init__(self) -> None:
        self._rest = b""  # a line that has not ended
        self._data: list[bytes] = []  # of the event that has not

    def feed(self, part: bytes) -> list[bytes]:
        """The data of events that end in this part. Raises HttpError for a line without
        end.
        """
        lines = (self._rest + part).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > LONGEST:
            raise HttpError("malformed", f"a line of more than {LONGEST:,} bytes")
        found: list[bytes] = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].removesuffix(b"\r").removeprefix(b" "))
            elif line in (b"", b"\r") and self._data:
                found.append(b"\n".join(self._data))
                self._data.clear()
        return found

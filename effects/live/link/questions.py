"""What a front asks all others, by way of the engine's host: who knows a request.

    front 0 --- Ask ---> host --- Asked ---> front 1, front 2, ...
            <-- Told ---      <-- Answer ---

A connection is any front's, so a request's id may come to one that never heard of it. The
host passes messages on and keeps nothing of them: each names the front that asks, and how
many others were asked. The first answer that is not empty ends a question, or the last
one. A caller waits for as long as it wants to, and then forgets its question.
"""

import secrets
from collections.abc import Callable
from typing import Final

from attrs import define

from minfer.effects.live.link import messages as wire

MOST_ASKED: Final = 64  # questions of a front that have no answer yet

# Hears what another front knows: JSON, or nothing; None: they cannot be asked now.
Hear = Callable[[bytes | None], None]


def nothing_known(wanted: wire.Wanted) -> bytes:
    """The answer of a front that serves no model yet."""
    del wanted
    return b""


@define(eq=False)
class _Open:
    """A question that has no answer yet."""

    hear: Hear
    empty: int = 0  # answers that came so far


class Inquirer:
    """A front's part, in the thread of its link."""

    def __init__(self) -> None:
        # What this front knows of a request; it may have to cancel it.
        self.answer: Callable[[wire.Wanted], bytes] = nothing_known
        self._send: Callable[[wire.ToEngine], None] | None = None
        self._open: dict[int, _Open] = {}

    def ask(self, wanted: wire.Wanted, hear: Hear) -> int:
        """Have `hear` called once; returns a number to `forget` the question by."""
        number = secrets.randbits(62)  # of no process that had this front's number before
        if self._send is None or len(self._open) >= MOST_ASKED:
            hear(None)
            return number
        self._open[number] = _Open(hear)
        self._send(wire.Ask(number, wanted))
        return number

    def forget(self, number: int) -> None:
        """Wait for that answer no longer."""
        self._open.pop(number, None)

    def connect(self, send: Callable[[wire.ToEngine], None]) -> None:
        """A link was made."""
        self._send = send

    def disconnect(self) -> None:
        """The link is over: no answer will come."""
        self._send = None
        unanswered, self._open = self._open, {}
        for one in unanswered.values():
            one.hear(None)

    def asked(self, asked: wire.Asked) -> None:
        """Answer what another front asks."""
        record = self.answer(asked.wanted)
        if self._send is not None:
            told = wire.Told(asked.number, asked.others, record)
            self._send(wire.Answer(asked.front, told))

    def told(self, told: wire.Told) -> None:
        """Take an answer to what was asked here; too late, it is left alone."""
        one = self._open.get(told.number)
        if one is None:
            return
        one.empty += 1
        if told.record or one.empty >= told.others:
            del self._open[told.number]
            one.hear(told.record)

"""A front's questions to all others about a request, by way of the engine's host.

    front 0 --- Ask ---> host --- Asked ---> front 1, front 2, ...
            <-- Told ---      <-- Answer ---

Any front may get a connection, so a question about a request may come to a front that
does not have it. The host passes messages on and keeps nothing of them: each names the
front that asks, and how many others were asked. The first answer that is not empty ends a
question, or the last one. A caller waits as long as it wants, and then forgets its
question.
"""

import secrets
from collections.abc import Callable
from typing import Final

from attrs import define

from minfer.effects.live.link import link_messages as wire

MOST_ASKED: Final = 64  # unanswered questions of a front

# Gets another front's answer: JSON, or nothing; None: they cannot be asked now.
Hear = Callable[[bytes | None], None]


def nothing_known(wanted: wire.RequestQuery) -> bytes:
    """Returns the answer of a front that serves no model yet."""
    del wanted
    return b""


@define(eq=False)
class _Open:
    """An unanswered question."""

    hear: Hear
    empty: int = 0  # empty answers so far


class RequestQueries:
    """One front's questions and answers, in the thread of its link."""

    def __init__(self) -> None:
        # Returns this front's record of a request; it may have to cancel it.
        self.answer: Callable[[wire.RequestQuery], bytes] = nothing_known
        self._send: Callable[[wire.ToEngine], None] | None = None
        self._open: dict[int, _Open] = {}

    def ask(self, wanted: wire.RequestQuery, hear: Hear) -> int:
        """Ask the others; `hear` is called once. Returns a number to `forget` the
        question by.
        """
        number = secrets.randbits(62)  # not used by earlier processes of this front
        if self._send is None or len(self._open) >= MOST_ASKED:
            hear(None)
            return number
        self._open[number] = _Open(hear)
        self._send(wire.SendQuery(number, wanted))
        return number

    def forget(self, number: int) -> None:
        """Stop waiting for an answer."""
        self._open.pop(number, None)

    def connect(self, send: Callable[[wire.ToEngine], None]) -> None:
        """Note a new link."""
        self._send = send

    def disconnect(self) -> None:
        """End all questions without an answer, as the link is over."""
        self._send = None
        unanswered, self._open = self._open, {}
        for one in unanswered.values():
            one.hear(None)

    def asked(self, asked: wire.ReceivedQuery) -> None:
        """Answer another front's question."""
        record = self.answer(asked.query)
        if self._send is not None:
            told = wire.QueryAnswer(asked.number, asked.others, record)
            self._send(wire.SendAnswer(asked.front, told))

    def told(self, told: wire.QueryAnswer) -> None:
        """Take an answer to this front's question; ignored if it is too late."""
        one = self._open.get(told.number)
        if one is None:
            return
        one.empty += 1
        if told.record or one.empty >= told.others:
            del self._open[told.number]
            one.hear(told.record)

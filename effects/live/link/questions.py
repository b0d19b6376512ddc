"""What a front asks all others, by way of the engine's host: who knows a request.

    front 0 --- Ask ---> host --- Asked ---> front 1, front 2, ...
            <-- Told ---      <-- Answer ---

A connection is any front's, so a request's id may come to one that never heard of it. The
first answer that is not empty is told, or that nobody knows. Whatever goes wrong, a
question is over: nobody waits longer than they want to, and as many are open at most as
the constants here say.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import count
from typing import Final, Protocol

from attrs import define

from minfer.effects.live.link import messages as wire

MOST_OPEN: Final = 256  # at the host; the oldest makes place
MOST_ASKED: Final = 64  # by a front; more are answered with nothing, at once


class Peer(Protocol):
    """A front, as the host sees it."""

    @property
    def send(self) -> Callable[[bytes], None]:
        """Send a message; it must not wait, nor raise."""
        ...


@define(eq=False)
class _Open:
    """A question that has no answer yet."""

    asker: Peer
    number: int  # the asker's
    left: list[Peer]  # who has not answered


class Questions:
    """The host's part."""

    def __init__(self) -> None:
        self._open: OrderedDict[int, _Open] = OrderedDict()
        self._numbers = count()

    def ask(self, asker: Peer, ask: wire.Ask, others: Sequence[Peer]) -> None:
        """Hand a question on to other fronts."""
        number = next(self._numbers)
        self._open[number] = _Open(asker, ask.number, list(others))
        if len(self._open) > MOST_OPEN:
            self._tell(next(iter(self._open)))
        for one in others:
            one.send(wire.encoded(wire.Asked(number, ask.wanted)))
        if not others:
            self._tell(number)

    def answer(self, who: Peer, answer: wire.Answer) -> None:
        """Take a front's answer; one that comes too late is left alone."""
        one = self._open.get(answer.number)
        if one is None or who not in one.left:
            return
        one.left.remove(who)
        if answer.record or not one.left:
            self._tell(answer.number, answer.record)

    def leave(self, who: Peer) -> None:
        """A front has gone: nobody waits for it, and what it asked is not wanted."""
        for number, one in list(self._open.items()):
            if one.asker is who:
                del self._open[number]
            elif who in one.left:
                self.answer(who, wire.Answer(number))

    def _tell(self, number: int, record: bytes = b"") -> None:
        one = self._open.pop(number)
        one.asker.send(wire.encoded(wire.Told(one.number, record)))


def nothing_known(wanted: wire.Wanted) -> bytes:
    """The answer of a front that serves nobody yet."""
    del wanted
    return b""


class Inquirer:
    """A front's part, in the thread of its link."""

    def __init__(self) -> None:
        # What this front knows of a request; it may be told to cancel it.
        self.answer: Callable[[wire.Wanted], bytes] = nothing_known
        self._send: Callable[[wire.ToEngine], None] | None = None
        self._asked: dict[int, Callable[[bytes], None]] = {}
        self._numbers = count()

    def ask(self, wanted: wire.Wanted, hear: Callable[[bytes], None]) -> int:
        """Have `hear` called once with what another front knows, or nothing; returns a
        number to `forget` it by.
        """
        number = next(self._numbers)
        if self._send is None or len(self._asked) >= MOST_ASKED:
            hear(b"")
            return number
        self._asked[number] = hear
        self._send(wire.Ask(number, wanted))
        return number

    def forget(self, number: int) -> None:
        """Nobody waits for that answer any more."""
        self._asked.pop(number, None)

    def connect(self, send: Callable[[wire.ToEngine], None]) -> None:
        """A link was made."""
        self._send = send

    def disconnect(self) -> None:
        """The link is over: no answer will come."""
        self._send = None
        asked, self._asked = self._asked, {}
        for hear in asked.values():
            hear(b"")

    def asked(self, asked: wire.Asked) -> None:
        """Answer what another front asks."""
        record = self.answer(asked.wanted)
        if self._send is not None:
            self._send(wire.Answer(asked.number, record))

    def told(self, answer: wire.Told) -> None:
        """Take the answer to what was asked here."""
        hear = self._asked.pop(answer.number, None)
        if hear is not None:
            hear(answer.record)

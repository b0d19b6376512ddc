"""Who runs alone after engines have died, so that nobody ends for a neighbour's fault.

Theory. An engine dies for reasons of its own, or because of what it serves. All that it
served is asked for again; a request that gets something new of an engine is cleared. One
that was let in, or whose grammar may have been at work (it was not in line yet), and that
saw `SUSPECT` engines in a row die without anything new from them may be what they
died of: suspects run first and alone, one after the other, each until it has its next
token, and all others wait for that. A request of which `GUILTY` engines died while they
served nobody else is given up by its front. So a request that kills ends alone, and a
process that is killed from outside costs nobody their request: for that it would have to
be killed again and again, always before the same request has its next token, and at the
end while that runs alone.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

from minfer.request import Request

SUSPECT: Final = 2  # engines that died in a row
GUILTY: Final = 2  # engines that died while they served nothing else


class Quarantine:
    """Who waits until suspects have shown what they are, and what is served when."""

    def __init__(self) -> None:
        self.probing = ""  # the suspect that runs, alone
        self._suspects: deque[Request] = deque()
        self._held: list[Request] = []

    @property
    def closed(self) -> bool:
        """Whether somebody is suspected, so that all others wait."""
        return bool(self.probing or self._suspects)

    def waiting(self) -> set[str]:
        """The ids of those who wait here."""
        return {request.id for queue in (self._suspects, self._held) for request in queue}

    def suspect(self, request: Request) -> None:
        """Have a request run alone when its turn comes."""
        self._suspects.append(request)

    def hold(self, requests: Sequence[Request]) -> None:
        """Have requests wait until nobody is suspected."""
        self._held += requests

    def drop(self, name: str) -> Request | None:
        """Forget a request that waits here; returns it, if it did."""
        for queue in (self._suspects, self._held):
            for request in queue:
                if request.id == name:
                    queue.remove(request)
                    return request
        return None

    def clear(self, name: str) -> bool:
        """Learn that a request has something new or has ended; whether it was the
        suspect that ran.
        """
        cleared = name == self.probing != ""
        if cleared:
            self.probing = ""
        return cleared

    def due(self) -> tuple[Request, ...]:
        """What is to be served now: the next suspect, alone, or all who waited."""
        if self.probing:
            return ()
        if self._suspects:
            first = self._suspects.popleft()
            self.probing = first.id
            return (first,)
        free = tuple(self._held)
        self._held.clear()
        return free

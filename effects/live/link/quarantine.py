"""Who runs alone after engines have died, so that nobody ends for a neighbour's fault.

Theory. An engine dies for reasons of its own, or because of what it serves. All that it
served is asked for again; a sample that gets more than `FEW` tokens of an engine is
cleared. One that was let in, or whose grammar may have been at work (it was not in line
yet), and that saw `SUSPECT` engines in a row die before it was cleared may be what they
died of: suspects run first and alone, one after the other, each until it is cleared or
ends, and all others wait for that. The suspect that saw most engines die is the first, as
one that was cleared runs on beside those that follow. A request of which `GUILTY` engines
died while they served nobody else (one more if they gave it tokens first, and about as
many each time) is given up by its front. So a request that kills ends
alone, also if each engine gives it a few tokens first, and a process that is killed from
outside costs nobody their request: for that it would have to be killed again and again,
always before the same request is cleared, and at the end while that runs alone.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from minfer.request import Request

SUSPECT: Final = 2  # engines that died in a row
GUILTY: Final = 2  # engines that died while they served nothing else
FEW: Final = 8  # tokens that an engine may give a sample and then die of it
ALIKE: Final = 2  # tokens by which those numbers differ at most, of which some are lost
# How the error of a request begins that is given up.
GIVEN_UP: Final = "the engine died again and again while it served this request alone"


class Quarantine:
    """Who waits until suspects have shown what they are, and what is served when."""

    def __init__(self) -> None:
        self.probing = ""  # the suspect that runs, alone
        self._got: Counter[int] = Counter()  # tokens that it has, by sample
        self._suspects: dict[int, list[Request]] = {}  # by deaths; no list is empty
        self._held: list[Request] = []

    @property
    def closed(self) -> bool:
        """Whether somebody is suspected, so that all others wait."""
        return bool(self.probing or self._suspects)

    def waiting(self) -> set[str]:
        """The ids of those who wait here."""
        queues = (*self._suspects.values(), self._held)
        return {request.id for queue in queues for request in queue}

    def suspect(self, request: Request, deaths: int = SUSPECT) -> None:
        """Have a request that saw so many engines die run alone when its turn comes."""
        self._suspects.setdefault(deaths, []).append(request)

    def hold(self, requests: Sequence[Request]) -> None:
        """Have requests wait until nobody is suspected."""
        self._held += requests

    def drop(self, name: str) -> Request | None:
        """Forget a request that waits here; returns it, if it did."""
        for queue in (*self._suspects.values(), self._held):
            for request in queue:
                if request.id == name:
                    queue.remove(request)
                    self._forget_empty()
                    return request
        return None

    def give(self, sample: int, tokens: int) -> bool:
        """Learn that a sample of the suspect that runs has new tokens; whether it has
        enough of them to be cleared.
        """
        self._got[sample] += tokens
        return self._got[sample] > FEW

    def clear(self, name: str) -> bool:
        """Learn that a request is cleared or has ended; whether it was the suspect that
        ran.
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
            first = self._suspects[max(self._suspects)].pop(0)
            self._forget_empty()
            self.probing = first.id
            self._got.clear()
            return (first,)
        free = tuple(self._held)
        self._held.clear()
        return free

    def _forget_empty(self) -> None:
        self._suspects = {deaths: each for deaths, each in self._suspects.items() if each}

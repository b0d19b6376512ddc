"""Runs suspects alone after engines have died, so that no request ends for another's
fault.

Theory. An engine dies for reasons of its own, or because of a request. All its requests
are resubmitted; a sample that gets more than `CLEARING_TOKENS` tokens from an engine is
cleared. A sample is suspected if it was admitted, or its grammar may have been compiling
(it was not in the queue yet), in `SUSPECT_DEATHS` engines in a row that died before it
was cleared. Suspects run first and alone, one after the other, each until it is cleared
or ends, and all other requests wait for that. The suspect that saw most engines die is
the first, as a cleared one continues to run beside those that follow. A request of which
`GUILTY_DEATHS` engines died while they served nothing else (one more if they gave it
tokens first, and about as many each time) is given up by its front. So a request that
kills engines ends alone, also if each engine gives it a few tokens first. A process that
is killed from outside costs no request: it would have to be killed again and again,
always before the same request is cleared, and at the end while that runs alone.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from minfer.records.request import Request

SUSPECT_DEATHS: Final = 2  # engines in a row that died
GUILTY_DEATHS: Final = 2  # engines that died while they served nothing else
CLEARING_TOKENS: Final = 8  # tokens that an engine may give a sample before it dies of it
TOKEN_TOLERANCE: Final = (
    2  # by how many tokens these numbers may differ, as some are lost
)
# Prefix of the error of a request that is given up.
GIVEN_UP: Final = "the engine died again and again while it served this request alone"


class Quarantine:
    """The suspects, and the requests that wait until these are cleared."""

    def __init__(self) -> None:
        self.probing = ""  # the suspect that runs alone
        self._got: Counter[int] = Counter()  # its tokens, by sample
        self._suspects: dict[int, list[Request]] = {}  # by deaths; no list is empty
        self._held: list[Request] = []

    @property
    def closed(self) -> bool:
        """Whether there is a suspect, so that all others wait."""
        return bool(self.probing or self._suspects)

    def waiting(self) -> set[str]:
        """Returns the ids of the requests that wait here."""
        queues = (*self._suspects.values(), self._held)
        return {request.id for queue in queues for request in queue}

    def suspect(self, request: Request, deaths: int = SUSPECT_DEATHS) -> None:
        """Add a suspect that saw so many engines die, to run alone in its turn."""
        self._suspects.setdefault(deaths, []).append(request)

    def hold(self, requests: Sequence[Request]) -> None:
        """Have requests wait until there is no suspect."""
        self._held += requests

    def drop(self, name: str) -> Request | None:
        """Remove a request that waits here; returns it, if it did."""
        for queue in (*self._suspects.values(), self._held):
            for request in queue:
                if request.id == name:
                    queue.remove(request)
                    self._forget_empty()
                    return request
        return None

    def give(self, sample: int, tokens: int) -> bool:
        """Count new tokens of a sample of the running suspect; returns whether it is
        cleared.
        """
        self._got[sample] += tokens
        return self._got[sample] > CLEARING_TOKENS

    def clear(self, name: str) -> bool:
        """Note that a request is cleared or has ended; returns whether it was the running
        suspect.
        """
        cleared = name == self.probing != ""
        if cleared:
            self.probing = ""
        return cleared

    def due(self) -> tuple[Request, ...]:
        """Returns the requests to serve now: the next suspect, alone, or all that
        waited.
        """
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

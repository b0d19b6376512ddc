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
        # In the order in which they came, with the engines that died of them.
        self._waiting: list[tuple[Request, int]] = []

    @property
    def closed(self) -> bool:
        """Whether there is a suspect, so that all others wait."""
        return bool(self.probing) or self._most_deaths() >= SUSPECT_DEATHS

    def waiting(self) -> set[str]:
        """Returns the ids of the requests that wait here."""
        return {request.id for request, _ in self._waiting}

    def hold(self, requests: Sequence[Request], deaths: int = 0) -> None:
        """Have requests wait until there is no suspect; each of them is one itself, to
        run alone in its turn, if it saw `SUSPECT_DEATHS` engines die.
        """
        self._waiting += [(request, deaths) for request in requests]

    def drop(self, name: str) -> Request | None:
        """Remove a request that waits here; returns it, if it did."""
        for at, (request, _) in enumerate(self._waiting):
            if request.id == name:
                del self._waiting[at]
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
        most = self._most_deaths()
        if most >= SUSPECT_DEATHS:
            first = next(one for one, deaths in self._waiting if deaths == most)
            self.drop(first.id)
            self.probing = first.id
            self._got.clear()
            return (first,)
        free = tuple(one for one, _ in self._waiting)
        self._waiting.clear()
        return free

    def _most_deaths(self) -> int:
        return max((deaths for _, deaths in self._waiting), default=0)

"""Runs suspects alone after engines have died, so that only the request that is the cause
ends with an error.

    add ---> waiting --+--> no suspect: all at once
                       +--> a suspect: `probing` --> all others have left: it starts -->
                            cleared, or ended: the next suspect, or all that wait

Theory. A suspect (`crash_rule`) waits until no other request runs, and then runs alone
until it is cleared or ends. The suspect with most engine deaths runs first.

All requests of some clients run alone (`crash_denylist`): from their start to their end,
but for `SOLO_SECONDS` at most. Between two of them, other requests run for as much time,
and at least `REST_SECONDS`.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from attrs import frozen

from minfer.effects.cluster.link.crash_rule import (
    CLEARING_TOKENS,
    REST_SECONDS,
    SOLO_SECONDS,
    SUSPECT_DEATHS,
)
from minfer.effects.live.request_names import request_of
from minfer.records.request import Request


@frozen
class QuarantinedRequest:
    """A request that waits."""

    request: Request
    deaths: int = 0  # engines in a row that served it, did not clear it and died
    to_clear: int = CLEARING_TOKENS  # more tokens than these of a sample clear it
    isolated: bool = False  # it runs alone whatever its deaths are

    @property
    def suspect(self) -> bool:
        """Whether it must be cleared before other requests run."""
        return self.deaths >= SUSPECT_DEATHS


class Quarantine:
    """The suspects, and the requests that wait until these are cleared."""

    def __init__(self) -> None:
        self.probing = ""  # the request that runs alone, or is the next to do so
        self.started = False  # it runs
        self._probed: QuarantinedRequest | None = None
        self._began = 0.0
        self._rest_until = 0.0  # when the next isolated request may run
        self._num_tokens: Counter[int] = Counter()  # its tokens, by sample
        self._waiting: list[QuarantinedRequest] = []  # in the order in which they came

    def waiting(self) -> set[str]:
        """Returns the ids of the requests that wait here."""
        return {entry.request.id for entry in self._waiting}

    def add(self, requests: Sequence[QuarantinedRequest]) -> None:
        """Have requests wait until there is no suspect."""
        self._waiting += requests

    def drop(self, name: str) -> Request | None:
        """Remove a request that waits here; returns it, if it did."""
        for index, entry in enumerate(self._waiting):
            if entry.request.id == name:
                del self._waiting[index]
                if name == self.probing:
                    self._end_probe()
                return entry.request
        return None

    def count_tokens(self, sample: int, tokens: int) -> bool:
        """Count new tokens of a sample of the running suspect; returns whether it is
        cleared.
        """
        self._num_tokens[sample] += tokens
        entry = self._probed
        return (
            entry is not None
            and not entry.isolated
            and self._num_tokens[sample] > entry.to_clear
        )

    def clear(self, name: str, now: float) -> bool:
        """Note that a request is cleared or has ended; returns whether it was the running
        suspect.
        """
        was_probing = name == self.probing != "" and self.started
        if was_probing:
            if self._probed is not None and self._probed.isolated:
                self._rest_until = now + max(REST_SECONDS, now - self._began)
            self._end_probe()
        return was_probing

    def is_over(self, now: float) -> bool:
        """Returns whether an isolated request has run alone for as long as it may."""
        entry = self._probed
        isolated = self.started and entry is not None and entry.isolated
        return isolated and now >= self._began + SOLO_SECONDS

    def take_due(
        self, running: Callable[[], Collection[str]], now: float
    ) -> tuple[Request, ...]:
        """Returns the requests to serve now: the next suspect, once no other request is
        `running`; without a suspect, all waiting requests.
        """
        if not self.probing and (entry := self._next_probe(now)) is not None:
            self.probing, self._probed = entry.request.id, entry
        if not self.probing:
            released = tuple(
                entry.request for entry in self._waiting if not entry.isolated
            )
            self._waiting = [entry for entry in self._waiting if entry.isolated]
            return released
        name = request_of(self.probing)  # the samples of a request may run together
        if self.started or any(
            request_of(running_name) != name for running_name in running()
        ):
            return ()
        self._waiting = [entry for entry in self._waiting if entry is not self._probed]
        self.started, self._began = True, now
        self._num_tokens.clear()
        return () if self._probed is None else (self._probed.request,)

    def _next_probe(self, now: float) -> QuarantinedRequest | None:
        suspects = [entry for entry in self._waiting if entry.suspect]
        if suspects:
            return max(suspects, key=lambda held: held.deaths)  # the first of these
        if now < self._rest_until:
            return None
        return next((entry for entry in self._waiting if entry.isolated), None)

    def _end_probe(self) -> None:
        self.probing, self.started, self._probed = "", False, None

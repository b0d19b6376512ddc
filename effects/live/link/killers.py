"""Requests of which an engine died while it served nothing else: they are not served
again for a while.

    a front ends one --> its killers --> engines --> the killers of all other fronts
                                          |
                                          +--> refused, whichever front sends it again

Every front and every engine has all of them, so that an engine or a front that starts
again learns them from the others. A request is known by its client and the digest of its
prompt and parameters. A client whose requests ended many engines may have changed the
request each time: all its requests run alone (`quarantine`).
"""

from collections import Counter
from collections.abc import Callable, Iterable
from hashlib import sha256
from typing import Final

import msgspec
from msgspec import Struct

from minfer.records.request import Request

REFUSED_SECONDS: Final = 600.0  # for which such a request is refused
MAX_KILLERS: Final = 10_000  # that are known; the oldest are forgotten
MAX_ENGINES: Final = 4  # that a client's requests may end before they run alone
# Prefix of the error of a request that is refused.
REFUSED: Final = "an engine died while it served this same request alone"
WHY_REFUSED: Final = (
    f"{REFUSED}; it is refused for {REFUSED_SECONDS / 60:g} minutes after that"
)


class Killer(Struct, frozen=True):
    """A request of which an engine died while it served nothing else."""

    client: str
    digest: bytes  # of its prompt and parameters
    engines: int  # that died while they served it
    age: float = 0.0  # seconds since the last of them died


def request_digest(request: Request) -> bytes:
    """Returns the digest of what determines a request's work: not its id and seed."""
    content = (
        request.prompt,
        request.max_tokens,
        request.n,
        request.stop_ids,
        request.bad_words,
        request.sampling,
        request.pooling,
    )
    return sha256(msgspec.msgpack.encode(content, order="deterministic")).digest()


class Killers:
    """Those of the last `REFUSED_SECONDS`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # When the last engine died of each, and how many did; in the order of arrival.
        self._known: dict[tuple[str, bytes], tuple[float, int]] = {}
        self._engines = Counter[str]()  # that died, by client

    def add(self, killers: Iterable[Killer]) -> tuple[Killer, ...]:
        """Note requests; returns those that were not known."""
        self._forget_old()
        new = []
        for killer in killers:
            key = (killer.client, killer.digest)
            if key in self._known or killer.age >= REFUSED_SECONDS:
                continue
            self._known[key] = (self._clock() - killer.age, killer.engines)
            self._engines[killer.client] += killer.engines
            new.append(killer)
        while len(self._known) > MAX_KILLERS:
            self._forget_first()
        return tuple(new)

    def all(self) -> tuple[Killer, ...]:
        """Returns all that are known."""
        self._forget_old()
        now, each = self._clock(), self._known.items()
        return tuple(Killer(*key, engines, now - time) for key, (time, engines) in each)

    def refuses(self, request: Request) -> bool:
        """Returns whether a request is one of these."""
        # Nearly always there is none, and nothing is hashed.
        client = request.client
        return self.has(client) and self.knows(client, request_digest(request))

    def has(self, client: str) -> bool:
        """Returns whether some may be of this client."""
        return client in self._engines

    def knows(self, client: str, digest: bytes) -> bool:
        """Returns whether a client's request with this digest is one of these."""
        known = self._known.get((client, digest))
        return known is not None and known[0] > self._clock() - REFUSED_SECONDS

    def isolates(self, client: str) -> bool:
        """Returns whether all requests of a client must run alone."""
        self._forget_old()
        return self._engines[client] > MAX_ENGINES

    def _forget_old(self) -> None:
        oldest = self._clock() - REFUSED_SECONDS
        while self._known and next(iter(self._known.values()))[0] <= oldest:
            self._forget_first()

    def _forget_first(self) -> None:
        key = next(iter(self._known))
        _, engines = self._known.pop(key)
        self._engines[key[0]] -= engines
        if not self._engines[key[0]]:
            del self._engines[key[0]]

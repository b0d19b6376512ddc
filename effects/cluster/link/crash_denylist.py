"""The denylist of requests that killed engines, the last one while they ran alone
(`crash_rule`). API servers and engines refuse them for `REFUSED_SECONDS`.

    an API server ends a request --> its denylist --> engines --> other API servers'
                                                         |
                                                         +--> refused, from any of them

Every API server and every engine has the whole list. An API server or an engine that
starts again gets it from the others. An entry is a client and the digest of a prompt and
its parameters. All requests of a client whose requests killed many engines run alone
(`quarantine`).
"""

from collections import Counter
from collections.abc import Callable, Iterable
from hashlib import sha256
from typing import Final

import msgspec
from msgspec import Struct

from minfer.effects.cluster.link.crash_rule import MAX_CLIENT_DEATHS, REFUSED_SECONDS
from minfer.records.request import Request

MAX_CRASHING_REQUESTS: Final = 10_000  # entries of a list; the oldest are removed


class CrashingRequest(Struct, frozen=True):
    """A request that killed engines."""

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
        request.adapter,
    )
    return sha256(msgspec.msgpack.encode(content, order="deterministic")).digest()


class CrashDenylist:
    """The crashing requests of the last `REFUSED_SECONDS`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # The time of the last crash and the number of crashes, in the order of arrival.
        self._known: dict[tuple[str, bytes], tuple[float, int]] = {}
        self._engines = Counter[str]()  # that died, by client

    def add(self, crashing: Iterable[CrashingRequest]) -> tuple[CrashingRequest, ...]:
        """Add requests; returns the new entries."""
        self._forget_old()
        new_entries = []
        for request in crashing:
            key = (request.client, request.digest)
            if key in self._known or request.age >= REFUSED_SECONDS:
                continue
            self._known[key] = (self._clock() - request.age, request.engines)
            self._engines[request.client] += request.engines
            new_entries.append(request)
        while len(self._known) > MAX_CRASHING_REQUESTS:
            self._forget_first()
        return tuple(new_entries)

    def all(self) -> tuple[CrashingRequest, ...]:
        """Returns all entries."""
        self._forget_old()
        now = self._clock()
        return tuple(
            CrashingRequest(*key, engines, now - time)
            for key, (time, engines) in self._known.items()
        )

    def refuses(self, request: Request) -> bool:
        """Returns whether a request is on the list."""
        # Nearly always the list is empty, and no digest is computed.
        client = request.client
        return self.has_client(client) and self.contains(client, request_digest(request))

    def has_client(self, client: str) -> bool:
        """Returns whether the list may have requests of a client."""
        return client in self._engines

    def contains(self, client: str, digest: bytes) -> bool:
        """Returns whether the list has a client's request with this digest."""
        entry = self._known.get((client, digest))
        return entry is not None and entry[0] > self._clock() - REFUSED_SECONDS

    def isolates(self, client: str) -> bool:
        """Returns whether all requests of a client must run alone."""
        self._forget_old()
        return self._engines[client] > MAX_CLIENT_DEATHS

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

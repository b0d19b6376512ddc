"""Publishes what the routers of API servers need of an engine that is one of several: the
content of its prefix cache, and its load.

Changes are folds over turns (`minfer.routing.replica_events`). They are sent every few
milliseconds, and at once where a request has ended, as its session may go on. An API
server that is new gets all keys, in pieces; what it hears twice then does no harm, as
keys are a set.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Final

from minfer.blocks.keys import Key, Keys
from minfer.effects.cluster.link import link_messages as wire
from minfer.records.config import EngineConfig
from minfer.records.messages import Emit
from minfer.records.state import EngineState, Transition
from minfer.routing.replica_events import (
    cache_changes,
    content_keys,
    load_report,
    routing_group,
)

CHANGES_SECONDS: Final = 0.005  # from one message of changes to the next
LOAD_SECONDS: Final = 0.25  # from one report of the load to the next
MAX_MESSAGE_KEYS: Final = 4096
MAX_INITIAL_KEYS: Final = 2**16  # of a new API server: 4 million tokens in blocks of 64


class CacheEventPublisher:
    """The cache events and load of one engine; `state` returns its state, in any thread.
    The caller holds a lock during each call, so that the state has all turns that were
    observed.
    """

    def __init__(self, config: EngineConfig, state: Callable[[], EngineState]) -> None:
        self._config = config
        self._state = state
        self._changes: dict[Key, bool] = {}  # by key: it was published, or evicted
        self._sent = 0.0  # when changes were sent last
        self._reported = 0.0  # when the load was
        self._ended = False  # a request, since changes were sent

    def observe(self, before: EngineState, transition: Transition) -> None:
        """Note the changes of a turn."""
        changes = cache_changes(self._config, before, transition.state)
        self._changes.update(dict.fromkeys(changes.evicted, False))
        self._changes.update(dict.fromkeys(changes.published, True))
        emits = (command for command in transition.commands if isinstance(command, Emit))
        self._ended = self._ended or any(emit.finished for emit in emits)

    def due_changes(self, now: float) -> Iterator[wire.CachedKeys]:
        """Yields the changes, if it is time to send them."""
        if self._changes and (self._ended or now >= self._sent + CHANGES_SECONDS):
            yield from self._take(now)

    def periodic_messages(
        self, now: float
    ) -> Iterator[wire.CachedKeys | wire.EngineLoad]:
        """Yields the changes that wait, and the load, if it is time to; to be called some
        times a second.
        """
        if self._changes:
            yield from self._take(now)
        if now >= self._reported + LOAD_SECONDS:
            self._reported = now
            load = load_report(self._config, "replica", self._state())
            pages = load.pages or 0
            yield wire.EngineLoad(
                load.waiting, load.running, load.prefill, pages, load.adapters
            )

    def all_keys(self) -> Iterator[wire.CachedKeys]:
        """Yields all keys in the cache, up to `MAX_INITIAL_KEYS`."""
        yield wire.CachedKeys(cleared=True)
        group = routing_group(self._config)
        if group is None:
            return
        nodes = islice(self._state().blocks.prefix.nodes, MAX_INITIAL_KEYS)
        for keys in _split_keys(content_keys(nodes, group)):
            yield wire.CachedKeys(published=keys)

    def _take(self, now: float) -> Iterator[wire.CachedKeys]:
        changes, self._changes = self._changes, {}
        self._sent, self._ended = now, False
        for keys in _split_keys(
            key for key, published in changes.items() if not published
        ):
            yield wire.CachedKeys(evicted=keys)
        for keys in _split_keys(key for key, published in changes.items() if published):
            yield wire.CachedKeys(published=keys)


def _split_keys(keys: Iterable[Key]) -> Iterator[Keys]:
    """Yields the keys, as many at once as a message has."""
    remaining = iter(keys)
    while chunk := tuple(islice(remaining, MAX_MESSAGE_KEYS)):
        yield chunk

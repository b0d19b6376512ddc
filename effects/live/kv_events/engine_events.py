"""The KV events of one engine: a fold over its turns.

    turn --> cache_changes (what was stored and removed) --> stored_blocks (its tokens)
         --> events --> publisher

The first is that of the servers' own routers. A block's hash is the end of its content
key. Blocks are those of layers without a window; with tenants or salts, the key before
the first block is among what its hash depends on (`extra_keys`), so that no router takes
it for a hit of another tenant.
"""

import time
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from minfer.blocks.keys import Key, Keys
from minfer.blocks.prefix import ROOT
from minfer.effects.live.kv_events.event_messages import (
    FULL_ATTENTION,
    MEDIUM,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KvEvent,
)
from minfer.effects.setup.kv_events_settings import (
    SETTING,
    KvEventsConfig,
    kv_events_config,
    published_events,
)
from minfer.records.config import EngineConfig
from minfer.records.state import EngineState, Transition
from minfer.routing.replica_events import cache_changes, routing_group
from minfer.routing.stored_blocks import StoredBlocks, stored_blocks
from minfer.values.checks import ConfigError

_HASH_BYTES: Final = 8


def _hash(key: Key) -> int:
    return int.from_bytes(key[-_HASH_BYTES:], "big")


def _hashes(keys: Keys) -> tuple[int, ...]:
    return tuple(map(_hash, keys))


class Publisher(Protocol):
    """What sends batches."""

    @property
    def rank(self) -> int:
        """The number of the engine among those of a server."""
        ...

    def publish(self, batch: EventBatch) -> None:
        """Send a batch soon."""
        ...

    def close(self) -> None:
        """Send what waits, and end."""
        ...


def open_publisher(setting: object, *, caches_prefixes: bool) -> Publisher | None:
    """Returns the publisher of the setting `kv_events_config`, if there are events.
    Raises ConfigError.
    """
    config = published_events(setting, caches_prefixes=caches_prefixes)
    return None if config is None else _open(config)


def check_layers(setting: object, config: EngineConfig) -> None:
    """Raise ConfigError if there are events, and no layers that they are about."""
    events = kv_events_config(setting)
    if events is not None and events.publishes and routing_group(config) is None:
        raise ConfigError(
            f"{SETTING}: all layers of this model have a window, and blocks of such "
            "layers are not published; leave it out"
        )


def _open(config: KvEventsConfig) -> Publisher:
    from minfer.effects.live.kv_events.zmq_publisher import ZmqPublisher  # needs an extra

    return ZmqPublisher(config)


class EngineEvents:
    """Publishes the events of an engine's turns."""

    def __init__(
        self,
        config: EngineConfig,
        publisher: Publisher,
        root: Callable[[], Key],
    ) -> None:
        """`root` returns the key before the first block of requests without a salt: it
        changes when the prefix cache is reset.
        """
        self._config = config
        self._publisher = publisher
        self._root = root
        self._last_root = root()
        self._group = routing_group(config)

    def observe(self, before: EngineState, transition: Transition) -> None:
        """Publish the events of a turn, if there are any."""
        if events := (*self._events(before, transition),):
            self._publisher.publish(EventBatch(time.time(), events, self._publisher.rank))

    def close(self) -> None:
        """Publish no more."""
        self._publisher.close()

    def _events(self, before: EngineState, transition: Transition) -> Iterator[KvEvent]:
        root = self._root()
        if root != self._last_root:
            self._last_root = root
            yield AllBlocksCleared()
        changes = cache_changes(self._config, before, transition.state)
        if changes.evicted:
            yield BlockRemoved(_hashes(changes.evicted), MEDIUM, self._group)
        if changes.published:
            for blocks in stored_blocks(
                self._config, before, transition, changes.published
            ):
                yield self._stored(blocks)

    def _stored(self, blocks: StoredBlocks) -> BlockStored:
        is_first = blocks.parent == ROOT
        salts: tuple[tuple[str, ...] | None, ...] | None = None
        if is_first and blocks.root != self._last_root:
            salts = ((blocks.root.hex(),), *(None,) * (len(blocks.keys) - 1))
        return BlockStored(
            block_hashes=_hashes(blocks.keys),
            parent_block_hash=None if is_first else _hash(blocks.parent),
            token_ids=blocks.tokens,
            block_size=self._config.block_size,
            lora_id=None,
            medium=MEDIUM,
            lora_name=None,
            extra_keys=salts,
            group_idx=self._group,
            kv_cache_spec_kind=FULL_ATTENTION,
        )

"""Blocks that a server has cached, by its stream of KV events, as vLLM publishes it.

A batch is msgpack: [seconds, events, ..]. Events are maps, or, of vLLM before 0.20,
arrays in the order below, whose first item is the kind:

    BlockStored       hashes of consecutive blocks, the hash before them, their token ids
    BlockRemoved      hashes
    AllBlocksCleared

Theory. A server's hashes cannot be computed here, so blocks get keys of their token ids,
chained from their parents' as the keys of requests are (`token_keys`). Each block's hash
is kept, as later events name it: as a parent, or as removed. Where batches were missed,
blocks count as gone; their hashes stay known, and a block that is stored behind them
shows that they are there, as a cached block has all that are before it.

Not followed are blocks outside of the GPU, of layers with sliding windows, partial ones,
and those that depend on more than tokens (adapters, images, salts).
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
from attrs import define, field, frozen

from minfer.blocks.keys import Key, Keys, block_key
from minfer.effects.proxy.token_keys import tokens_root
from minfer.routing.messages import (
    BlocksEvicted,
    BlocksPublished,
    CacheCleared,
    RouterEvent,
)

MAX_UNCACHED_BLOCKS: Final = 2**20  # blocks of a server that are not known to be there
_GPU_MEDIA: Final = (None, "GPU", "gpu")
_FIELD_ORDER: Final[Mapping[str, tuple[str, ...]]] = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
BlockHash = int | bytes  # a server's own
# What reading an invalid batch raises; RecursionError where it is nested too deep.
_DECODE_ERRORS: Final = (
    *(LookupError, RecursionError, OverflowError, TypeError, ValueError),
    msgspec.MsgspecError,
)


class KvEventError(ValueError):
    """A batch of events that cannot be read."""


@frozen
class _Block:
    key: Key
    parent: BlockHash | None


@define(eq=False)
class ReportedCache:
    """The blocks of one server, of `block_size` tokens."""

    replica: str
    block_size: int
    _blocks: dict[BlockHash, _Block] = field(factory=dict, init=False)
    _cached: set[BlockHash] = field(factory=set, init=False)  # of these, cached now
    _group: int | None = field(default=None, init=False)  # the group of layers, if any

    def cached(self) -> Keys:
        """The keys of all blocks that are cached."""
        return tuple([self._blocks[block_hash].key for block_hash in self._cached])

    def read(self, payload: bytes) -> list[RouterEvent]:
        """Fold a batch; returns what it means to a router. Raises KvEventError."""
        try:
            batch = msgspec.msgpack.decode(payload)
            events = batch["events"] if isinstance(batch, dict) else batch[1]
            return [
                router_event
                for event in events
                for router_event in self._fold(*_kind_and_fields(event))
            ]
        except _DECODE_ERRORS as error:
            raise KvEventError(f"no batch of KV events: {error!r}") from None

    def note_missed(self) -> CacheCleared:
        """Note that batches were missed: what is cached is not known."""
        self._cached.clear()
        return CacheCleared(self.replica)

    def note_restart(self) -> CacheCleared:
        """Note that the server was started again: its hashes may be others."""
        self._blocks.clear()
        self._group = None
        return self.note_missed()

    def _fold(self, kind: str, event: Mapping[str, Any]) -> Iterator[RouterEvent]:
        if kind == "AllBlocksCleared":
            yield self.note_missed()
        elif event.get("medium") not in _GPU_MEDIA:
            return
        elif kind == "BlockStored" and self._is_followed(event):
            stored = self._stored(event)
            if stored:
                yield BlocksPublished(self.replica, stored)
        elif kind == "BlockRemoved" and event.get("group_idx") in (None, self._group):
            removed = self._removed(event["block_hashes"])
            if removed:
                yield BlocksEvicted(self.replica, removed)

    def _is_followed(self, event: Mapping[str, Any]) -> bool:
        group = event.get("group_idx")
        plain = (
            event["block_size"] == self.block_size
            and not event.get("kv_cache_spec_sliding_window")
            and event.get("lora_id") is None
            and event.get("lora_name") is None
            and not any(event.get("extra_keys") or ())
        )
        if plain and self._group is None:
            self._group = group
        return plain and group == self._group

    def _stored(self, event: Mapping[str, Any]) -> Keys:
        """The keys of new blocks, with those before them that turn out to be there."""
        parent, hashes = event["parent_block_hash"], event["block_hashes"]
        ids, size = event["token_ids"], self.block_size
        if len(ids) != len(hashes) * size:
            raise ValueError(f"{len(hashes)} blocks have {len(ids)} token ids")
        if parent is not None and parent not in self._blocks:
            return ()  # its beginning was missed
        keys = [*reversed([*self._recached(parent)])]
        key = tokens_root() if parent is None else self._blocks[parent].key
        for index, block_hash in enumerate(hashes):
            key = block_key(key, ids[index * size : (index + 1) * size])
            self._blocks[block_hash] = _Block(key, parent)
            self._cached.add(block_hash)
            keys.append(key)
            parent = block_hash
        if len(self._blocks) > len(self._cached) + MAX_UNCACHED_BLOCKS:
            self._blocks = {
                block_hash: self._blocks[block_hash] for block_hash in self._cached
            }
        return tuple(keys)

    def _recached(self, block_hash: BlockHash | None) -> Iterator[Key]:
        """The blocks from this one to the first that were not known to be there."""
        while (
            block_hash is not None
            and block_hash not in self._cached
            and block_hash in self._blocks
        ):
            self._cached.add(block_hash)
            block = self._blocks[block_hash]
            yield block.key
            block_hash = block.parent

    def _removed(self, hashes: list[BlockHash]) -> Keys:
        cached_hashes = [
            block_hash for block_hash in hashes if block_hash in self._cached
        ]
        self._cached.difference_update(cached_hashes)
        keys = tuple([self._blocks[block_hash].key for block_hash in cached_hashes])
        for block_hash in hashes:
            self._blocks.pop(block_hash, None)
        return keys


def _kind_and_fields(event: Any) -> tuple[str, Mapping[str, Any]]:
    """An event's kind and its fields by name. Raises KeyError and the like."""
    if isinstance(event, dict):
        kind = event["type"]
        return kind, event if kind in _FIELD_ORDER else {}
    kind, *values = event
    return kind, dict(zip(_FIELD_ORDER.get(kind, ()), values, strict=False))

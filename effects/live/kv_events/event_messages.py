"""The messages of KV events, as vLLM 0.33 has them: msgpack.

    batch     [seconds, events, data parallel rank]
    events    {"type": "BlockStored", "block_hashes": [..], "token_ids": [..], ..}
              {"type": "BlockRemoved", "block_hashes": [..], ..}
              {"type": "AllBlocksCleared"}

Hashes are whole numbers of 64 bits, as vLLM's are by default: not all subscribers read
longer ones. A field with its default is left out, and so are vLLM's other fields
(sessions, localities, lookahead tokens).
"""

from typing import Final

import msgspec

MEDIUM: Final = "GPU"  # where the blocks are; also on a device of another kind
FULL_ATTENTION: Final = "full_attention"  # the layers that the blocks are of


class KvEvent(msgspec.Struct, tag=True, omit_defaults=True, frozen=True):
    """Base of all events."""


class BlockStored(KvEvent, frozen=True):
    """Consecutive full blocks that can be hit from now on."""

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None  # of the block before the first; None: there is none
    token_ids: tuple[int, ...]  # of all blocks
    block_size: int  # tokens
    lora_id: None  # an adapter is in the extra key of a prompt's first block
    medium: str
    lora_name: None
    # For each block what its hash depends on besides tokens; only the first of a prompt
    # has such values.
    extra_keys: tuple[tuple[str, ...] | None, ...] | None = None
    group_idx: int | None = None  # the group of layers
    kv_cache_spec_kind: str | None = None


class BlockRemoved(KvEvent, frozen=True):
    """Blocks that were evicted."""

    block_hashes: tuple[int, ...]
    medium: str
    group_idx: int | None = None


class AllBlocksCleared(KvEvent, frozen=True):
    """No block can be hit any more."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """The events of a turn."""

    ts: float  # seconds since 1970
    events: tuple[KvEvent, ...]
    data_parallel_rank: int | None = None

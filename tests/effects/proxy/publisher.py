"""A publisher of KV events, which says on the wire what vLLM 0.26 to 0.33 say."""

from typing import Any

import msgspec
import zmq
import zmq.asyncio

from minfer.blocks.keys import Keys, block_keys
from minfer.effects.proxy.token_keys import tokens_root

SIZE = 4  # tokens of a block
END = (-1).to_bytes(8, "big", signed=True)


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True):
    pass


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def batch(*events: Any) -> bytes:
    return msgspec.msgpack.encode(Batch(1.5, [*events], 0))


def stored(first: int, *hashes: bytes | int, after: Any = None, **overrides: Any) -> Any:
    """Blocks of the tokens from `first` on."""
    ids = [*range(first, first + SIZE * len(hashes))]
    fields = {"block_size": SIZE, "lora_id": None, "medium": "GPU", "lora_name": None}
    return BlockStored([*hashes], after, ids, **{**fields, **overrides})


def removed(*hashes: bytes | int, medium: str = "GPU", **fields: Any) -> Any:
    return BlockRemoved([*hashes], medium, **fields)


def keys(*firsts: int) -> Keys:
    """The keys of a prompt whose blocks begin with these tokens."""
    ids = [token_id for first in firsts for token_id in range(first, first + SIZE)]
    return block_keys(tokens_root(), ids, SIZE)


class Publisher:
    """Sends batches, and again those of them that are `kept`."""

    def __init__(self, *, replays: bool = True) -> None:
        self._context = zmq.asyncio.Context()
        self._context.setsockopt(zmq.LINGER, 0)
        self._pub = self._context.socket(zmq.PUB)
        port = self._pub.bind_to_random_port("tcp://127.0.0.1")
        self.url = f"tcp://127.0.0.1:{port}"
        self.kept: list[tuple[int, bytes]] = []
        self.asked: list[int] = []
        self._router = self._context.socket(zmq.ROUTER)
        port = self._router.bind_to_random_port("tcp://127.0.0.1")
        if replays:
            self.url += f",tcp://127.0.0.1:{port}"

    async def send(self, number: int, data: bytes, *, keeps: bool = True) -> None:
        if keeps:
            self.kept.append((number, data))
        await self._pub.send_multipart([b"", number.to_bytes(8, "big"), data])

    async def replay(self) -> None:
        """Answer all who ask, until cancelled."""
        while True:
            client, _, first = await self._router.recv_multipart()
            self.asked.append(int.from_bytes(first, "big"))
            for number, data in self.kept:
                if number >= self.asked[-1]:
                    frames = [client, b"", number.to_bytes(8, "big"), data]
                    await self._router.send_multipart(frames)
            await self._router.send_multipart([client, b"", END, b""])

    def close(self) -> None:
        self._context.destroy(linger=0)

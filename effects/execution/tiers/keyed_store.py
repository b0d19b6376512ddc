"""Where the blocks of the external store are: a folder, or other engines."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Protocol

from minfer.blocks.keys import Key, Keys
from minfer.effects.execution.tiers.head_slices import HeadSlices

Contents = Sequence[memoryview]  # of a block: bytes, one after the other


def checksum_of(contents: Contents) -> int:
    """Returns the CRC-32 of a block's contents."""
    checksum = 0
    for chunk in contents:
        checksum = zlib.crc32(chunk, checksum)
    return checksum


class NotStoredError(Exception):
    """A block could not be stored in a folder, or fetched from it. The code that raises
    it has logged what an operator must know. Between engines, it is a `PeerError`.
    """


class KeyedStore(Protocol):
    """Stores blocks by their content keys, and fetches them. Methods may be called from
    any thread.
    """

    @property
    def slices(self) -> HeadSlices:
        """The slices of a block that this engine's rank stores and fetches, each under a
        key of its own.
        """
        ...

    def open(self, layout: bytes, block_bytes: int) -> None:
        """Prepare to take blocks of up to `block_bytes`, and states of recurrent layers,
        which may be larger; `layout` is a digest of how pages are stored.
        """
        ...

    def check_stores(self) -> None:
        """Raise NotStoredError if nothing is stored at present."""
        ...

    def leading(self, keys: Keys) -> int:
        """Returns how many of a prompt's leading blocks are believed to be there."""
        ...

    def want(self, keys: Keys, engine: str) -> None:
        """Have the blocks of a prompt sent to another engine, once they are computed."""
        ...

    def read(self, key: Key, layout: bytes, contents: Contents) -> None:
        """Read a block into `contents`. Raises NotStoredError, or PeerError if another
        engine was to send it.
        """
        ...

    def write(self, key: Key, layout: bytes, contents: Contents) -> None:
        """Store a block, or send it. Raises NotStoredError, or PeerError for an engine
        that is not known.
        """
        ...

    def note(self, *, fetches: bool, seconds: float, dropped: int = 0) -> None:
        """Count the time of a transfer, and blocks that were not stored."""
        ...

    def totals(self) -> Mapping[str, float]:
        """Returns all counts so far."""
        ...

    def close(self) -> None:
        """Release what it holds."""
        ...

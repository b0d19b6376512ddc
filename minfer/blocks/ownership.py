"""Ownership of the pages of the KV cache.

Theory. A block of a group of layers is a bundle of pages (`CacheGroup`), which stay
together. A block is in exactly one of four places:

    free       its content is unused (minfer/blocks/pool.py)
    private    in the table of one running sequence (or behind one fence), without a key
    live       published under a content key, and held by some running sequence
    idle       published, held by no sequence: kept until the space is needed

The last two are the prefix index (minfer/blocks/prefix.py). Allocation connects the two:
if too few pages are free, idle ones are evicted, and the caller gets their keys before
the content is overwritten.
"""

from typing import Final

from attrs import Factory, frozen

from minfer.blocks.pool import Pool, PoolChange
from minfer.blocks.prefix import Evicted, PrefixChange, PrefixIndex

NOTHING_EVICTED: Final = Evicted()


@frozen(slots=False)
class Blocks:
    """Ownership of all pages."""

    pool: Pool
    prefix: PrefixIndex = Factory(PrefixIndex)

    @property
    def free(self) -> int:
        """Pages without known content."""
        return self.pool.free

    @property
    def live(self) -> int:
        """Published pages that some sequence holds."""
        return self.prefix.live

    @property
    def idle(self) -> int:
        """Published pages that no sequence holds: cached until the space is needed."""
        return self.prefix.idlers

    @property
    def available(self) -> int:
        """Pages that can be allocated now."""
        return self.pool.free + self.prefix.idlers


@frozen
class Taken:
    """Allocated pages, and what was evicted for them."""

    pages: tuple[int, ...]
    evicted: Evicted = NOTHING_EVICTED  # its content is there until the next step runs


class Transaction:
    """A change of ownership being built. Never kept, never shared: open, change, `done`.

    Each half is opened when it is first used: most transactions use one of them.
    """

    __slots__ = ("_before", "_pool", "_prefix")

    def __init__(self, before: Blocks) -> None:
        self._before = before
        self._pool: PoolChange | None = None
        self._prefix: PrefixChange | None = None

    @property
    def pool(self) -> PoolChange:
        """The free blocks, to be changed."""
        if self._pool is None:
            self._pool = PoolChange(self._before.pool)
        return self._pool

    @property
    def prefix(self) -> PrefixChange:
        """The prefix index, to be changed."""
        if self._prefix is None:
            self._prefix = PrefixChange(self._before.prefix)
        return self._prefix

    def done(self) -> Blocks:
        """Ownership with all changes; the transaction is of no use after it."""
        pool, prefix = self._pool, self._prefix
        return Blocks(
            self._before.pool if pool is None else pool.done(),
            self._before.prefix if prefix is None else prefix.done(),
        )

    @property
    def available(self) -> int:
        """As `Blocks.available`."""
        prefix = self._before.prefix if self._prefix is None else self._prefix
        return self.pool.free + prefix.idlers

    def take(self, count: int) -> Taken | None:
        """Allocate `count` pages, evicting idle ones if needed; None if there are not
        enough.
        """
        pool = self.pool
        if count <= pool.free:
            return Taken(pool.take(count))
        if not self.prefix.can_evict(count - pool.free):
            return None
        evicted = self.prefix.evict(count - pool.free)
        pool.release(evicted.pages)
        return Taken(pool.take(count), evicted)


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that a sequence of up to `tokens` tokens needs: its last token is never an
    input.
    """
    return -(-max(tokens - 1, 1) // block_size)

"""Free pages: which they are, and in which order they are allocated.

Theory. The content of a free page is unused. Blocks that were never used are a range
that only shrinks, so a pool of millions is a number; released ones are allocated first,
the last released before all others. They are kept in two levels: a short tuple (`spare`),
and a stack of runs under it, so that releasing many does not copy those below. If more
are wanted than `spare` has, the top run is put before it. No run is empty, so there are
never more runs than free pages.
"""

from attrs import Factory, frozen

from minfer.values.pmap import Map


@frozen
class Pool:
    """The free ones of `total` pages, at first all of them."""

    total: int
    run: int = 64  # pages that `spare` holds before it becomes a run of `freed`
    fresh: int = 0  # pages fresh..total-1 were never used
    spare: tuple[int, ...] = ()  # released ones, the next to be allocated first
    freed: Map[int, tuple[int, ...]] = Map()  # stack of further runs of them, by depth
    free: int = Factory(lambda self: self.total, takes_self=True)  # how many, in all


class PoolChange:
    """A change of a pool being built. Never kept, never shared: open, change, `done`."""

    __slots__ = ("free", "freed", "fresh", "run", "spare", "total")

    def __init__(self, pool: Pool) -> None:
        self.total = pool.total
        self.run = pool.run
        self.fresh = pool.fresh
        self.spare = pool.spare
        self.freed = pool.freed
        self.free = pool.free

    def done(self) -> Pool:
        """The pool with all changes."""
        return Pool(self.total, self.run, self.fresh, self.spare, self.freed, self.free)

    def take(self, count: int) -> tuple[int, ...]:
        """Allocate `count` pages; the caller has checked that as many are free."""
        spare = self.spare
        while len(spare) < count and self.freed:
            depth = len(self.freed) - 1
            spare = self.freed[depth] + spare
            self.freed = self.freed.delete(depth)
        short = count - len(spare)
        if short > 0:
            spare += tuple(range(self.fresh, self.fresh + short))
            self.fresh += short
        self.free -= count
        self.spare = spare[count:]
        return spare[:count]

    def release(self, pages: tuple[int, ...]) -> None:
        """Return pages to the pool."""
        if self.spare and len(self.spare) + len(pages) > self.run:
            self.freed = self.freed.set(len(self.freed), self.spare)
            self.spare = ()
        self.spare = pages + self.spare
        self.free += len(pages)

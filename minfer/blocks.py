"""Who owns which block of the KV cache.

Theory. A block is in exactly one of four places:

    free       nobody knows its content: `fresh` (never used), `spare` or a run of `freed`
    private    in the table of one running sequence (or behind one fence), content still
               unnamed
    live       published under a content key, and some running sequence stands on it
    idle       published, nobody stands on it: kept until the space is needed

Published blocks form a forest: a node's parent is the block of the prefix before it. A
sequence holds only the *deepest* published block of its table, its leaf. A node's count
of `users` is the sequences whose leaf it is plus those of its children that have users,
so a block is live if and only if it has any, and holding or releasing a leaf walks up
only as far as counts change between zero and one: a shared prefix of 500 blocks costs one
step to take and to give back.

Only idle blocks without cached children (`kids`) can be evicted, the longest unused
first, so an ancestor never goes before its descendants. Hence the cached part of any
chain of keys is a prefix of that chain, and a lookup is a binary search.

With a sliding window a sequence lets go of ancestors while it goes on: blocks are
published alone, each a root, and it holds those in its window one by one. A cached chain
may then have gaps, and a hit needs the last window's blocks only.
"""

from bisect import bisect_left
from itertools import islice
from typing import Final

from attrs import Factory, frozen

from minfer.keys import Key, Keys
from minfer.pmap import Map
from minfer.tickets import Words, add, drop, least, words_of

ROOT: Final = (
    -1
)  # the parent of a first block; the leaf of a sequence that has published nothing
NONE: Final = -1  # the ticket of a block that is live, or was not used yet

# A published block: the digest of its content, its parent, its users, its cached
# children, and the ticket of its last use. A plain tuple: this is the engine's most
# frequent record.
Node = tuple[Key, int, int, int, int]


@frozen
class Blocks:
    """Ownership of `total` blocks, at first all free. Read the module's theory for the
    fields.
    """

    total: int
    run: int = 64  # blocks that `spare` holds before it becomes a run of `freed`
    fresh: int = 0  # blocks fresh..total-1 were never used
    spare: tuple[int, ...] = ()  # freed blocks, the next to be handed out
    freed: Map[int, tuple[int, ...]] = (
        Map()
    )  # stack of further runs of freed blocks, by depth
    free: int = Factory(
        lambda self: self.total, takes_self=True
    )  # how many, in all three
    index: Map[Key, int] = Map()  # content key -> block
    nodes: Map[int, Node] = Map()
    live: int = 0  # how many of the nodes have users
    idle: Map[int, int] = (
        Map()
    )  # ticket -> idle block without children; lower tickets go first
    low: int = 0  # no ticket in `idle` is below
    high: int = 0  # the next ticket
    words: Words = Factory(
        lambda self: words_of(self.idle), takes_self=True
    )  # tickets in `idle`

    @property
    def available(self) -> int:
        """Blocks that could be handed out now: free, or cached and nobody
        stands on them.
        """
        return self.free + len(self.nodes) - self.live


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that a sequence of up to `tokens` tokens needs: its last token is never an
    input.
    """
    return -(-max(tokens - 1, 1) // block_size)


def lookup(blocks: "Blocks | Draft", keys: Keys, end: int | None = None) -> int:
    """How many of the first `end` keys are cached, the leading ones: cached chains have
    no gaps.
    """
    if not keys or keys[0] not in blocks.index:
        return 0
    return bisect_left(keys, True, hi=end, key=lambda key: key not in blocks.index)


def live(blocks: "Blocks | Draft", key: Key) -> bool:
    """Whether a block of this content is cached, and some running sequence
    stands on it.
    """
    block = blocks.index.get(key)
    return block is not None and blocks.nodes[block][2] > 0


def outside(position: int, window: int, block_size: int) -> int:
    """How many leading blocks no query from `position` on reads; none if
    `window` is 0.
    """
    return max(0, position + 1 - window) // block_size if window else 0


def lookup_window(
    blocks: Blocks, keys: Keys, end: int, window: int, block_size: int
) -> int:
    """The most of the first `end` keys after which the next query finds all that it
    reads.
    """
    span = -(
        -(window - 1) // block_size
    )  # blocks before it that a query at a block's start reads
    cached = bytes(map(blocks.index.__contains__, islice(keys, end)))
    found = cached.rfind(b"\1" * span)
    if found >= 0:
        return found + span
    return len(cached) - len(
        cached.lstrip(b"\1")
    )  # near the beginning there are fewer to read


class Draft:
    """Changes to a pool in the making. Never kept, never shared: open, change, `done`."""

    def __init__(self, blocks: Blocks) -> None:
        self.total, self.run = blocks.total, blocks.run
        self.fresh, self.spare = blocks.fresh, blocks.spare
        self.freed, self.free, self.live = blocks.freed, blocks.free, blocks.live
        self.low, self.high = blocks.low, blocks.high
        self.index, self.nodes = blocks.index.mutate(), blocks.nodes.mutate()
        self.idle, self.words = blocks.idle.mutate(), blocks.words.mutate()

    def done(self) -> Blocks:
        """The pool with all changes; the draft is of no use after it."""
        return Blocks(
            self.total,
            self.run,
            self.fresh,
            self.spare,
            self.freed,
            self.free,
            self.index.finish(),
            self.nodes.finish(),
            self.live,
            self.idle.finish(),
            self.low,
            self.high,
            self.words.finish(),
        )

    @property
    def available(self) -> int:
        """As `Blocks.available`."""
        return self.free + len(self.nodes) - self.live

    def take(self, count: int) -> tuple[int, ...] | None:
        """Hand out `count` blocks, evicting idle ones if need be; None if there are not
        as many.
        """
        if count > self.available:
            return None
        if count > self.free:
            self._evict(count - self.free)
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

    def give(self, private: tuple[int, ...]) -> None:
        """Return private blocks to the free ones."""
        if len(self.spare) + len(private) > self.run:
            self.freed = self.freed.set(len(self.freed), self.spare)
            self.spare = ()
        self.spare = private + self.spare
        self.free += len(private)

    def hold(self, leaf: int) -> None:
        """One more sequence stands on `leaf`."""
        nodes = self.nodes
        while leaf != ROOT:
            key, parent, users, kids, ticket = nodes[leaf]
            nodes[leaf] = (key, parent, users + 1, kids, NONE)
            if users:
                return
            self.live += 1
            if not kids:
                self._unlisted(ticket)
            leaf = parent

    def release(self, leaf: int) -> None:
        """One sequence fewer stands on `leaf`; what nobody stands on any more becomes
        idle.
        """
        nodes, block, last_use = self.nodes, leaf, self.high
        while block != ROOT:
            key, parent, users, kids, _ = nodes[block]
            if users > 1:
                nodes[block] = (key, parent, users - 1, kids, NONE)
                return
            self.live -= 1
            nodes[block] = (key, parent, 0, kids, last_use)
            if block == leaf:
                self.high += 1
                if not kids:
                    self._listed(leaf, last_use)
                last_use = NONE  # of the others nobody knows more than that it was before
            block = parent

    def publish(
        self, leaf: int, keys: Keys, private: tuple[int, ...]
    ) -> tuple[int, tuple[int, ...]]:
        """Name full private blocks that follow `leaf` in the holder's table, one key
        each.

        Returns the holder's new leaf and the blocks that stay private because their
        content is cached already under another block (the holder then stands on that
        one).
        """
        twins = lookup(self, keys)
        if twins:
            twin = self.index[keys[twins - 1]]
            self.hold(twin)
            self.release(leaf)
            leaf = twin
        index, nodes, new = self.index, self.nodes, private[twins:]
        if (
            new and leaf != ROOT
        ):  # its count of users stays: a holder less, a live child more
            key, parent, users, kids, ticket = nodes[leaf]
            nodes[leaf] = (key, parent, users, kids + 1, ticket)
        last = len(new) - 1  # that one has no child yet
        for at, (key, block) in enumerate(zip(keys[twins:], new, strict=True)):
            index[key] = block
            nodes[block] = (key, leaf, 1, int(at < last), NONE)
            leaf = block
        self.live += len(new)
        return leaf, private[:twins]

    def publish_alone(self, key: Key, block: int) -> bool:
        """Name one private block, which its owner then holds; not if its content is
        cached.
        """
        if key in self.index:
            return False
        self.index[key] = block
        self.nodes[block] = (key, ROOT, 1, 0, NONE)
        self.live += 1
        return True

    def _evict(self, count: int) -> None:
        """Forget the `count` longest unused idle blocks, of which there are as many."""
        nodes, index, low = self.nodes, self.index, self.low
        gone: list[int] = []
        while len(gone) < count:
            low = least(self.words)
            block = self._unlisted(low)
            key, parent, _, _, _ = nodes.pop(block)
            while True:
                del index[key]
                gone.append(block)
                if parent == ROOT:
                    break
                block = parent
                key, parent, users, kids, ticket = nodes.pop(block)
                if kids > 1 or users:
                    nodes[block] = (key, parent, users, kids - 1, ticket)
                    break
                # The last child is gone: the parent's turn, at its own last use if that
                # is later.
                if ticket > low or len(gone) == count:
                    ticket = max(ticket, low)
                    nodes[block] = (key, parent, 0, 0, ticket)
                    self._listed(block, ticket)
                    break
        self.low = low
        self.give(tuple(gone))

    def _listed(self, block: int, ticket: int) -> None:
        """From now on `block` can be evicted: it was last used at `ticket`."""
        self.idle[ticket] = block
        add(self.words, ticket)

    def _unlisted(self, ticket: int) -> int:
        """The block last used at `ticket`, which is not to be evicted any more, or just
        now.
        """
        drop(self.words, ticket)
        return self.idle.pop(ticket)

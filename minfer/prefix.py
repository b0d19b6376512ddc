"""The prefix index: which content is cached in which block, who stands on it, what goes
first.

Theory. Published blocks form a forest: a node's parent is the block of the prefix before
it. A sequence holds only the *deepest* published block of its table, its leaf. A node's
count of `users` is the sequences whose leaf it is plus those of its children that have
users, so a block is live if and only if it has any, and holding or releasing a leaf walks
up only as far as counts change between zero and one: a shared prefix of 500 blocks costs
one step to take and to give back.

Only idle blocks without cached children can be evicted, the longest unused first, so an
ancestor never goes before its descendants. Hence the cached part of any chain of keys is
a prefix of that chain, and a lookup is a binary search.

With a sliding window a sequence lets go of ancestors while it goes on: blocks are
published alone, each a root, and it holds those in its window one by one. A cached chain
may then have gaps, and a hit needs the last window's blocks only.
"""

from bisect import bisect_left
from typing import Final, NamedTuple, TypeAlias

from attrs import Factory, frozen

from minfer.keys import Key, Keys
from minfer.pmap import Map
from minfer.tickets import Words, add, drop, least, words_of

ROOT: Final = -1  # the parent of a first block; the leaf of who has published nothing
NONE: Final = -1  # the last use of a block that is live, or was not used yet


# How nodes are made here, where many are: their own constructor takes twice as long.
_new: Final = tuple.__new__


class Node(NamedTuple):
    """A published block. This is the engine's most frequent record: a named tuple is made
    in half the time of a frozen class.
    """

    key: Key  # the digest of its content
    parent: int  # block, or ROOT
    users: int
    children: int  # that are cached
    last_use: int  # a ticket: lower ones were longer ago


@frozen
class PrefixIndex:
    """Published blocks. Read the module's theory for the fields."""

    index: Map[Key, int] = Map()  # content key -> block
    nodes: Map[int, Node] = Map()
    live: int = 0  # how many of the nodes have users
    idle: Map[int, int] = Map()  # last use -> idle block without children
    next_use: int = 0  # the next ticket
    words: Words = Factory(lambda self: words_of(self.idle), takes_self=True)  # in `idle`

    @property
    def idlers(self) -> int:
        """How many are cached and nobody stands on them."""
        return len(self.nodes) - self.live


@frozen
class Evicted:
    """Cached blocks that are about to be used for something else, in that order."""

    blocks: tuple[int, ...] = ()
    keys: Keys = ()  # of the content that they have until then


Index: TypeAlias = "PrefixIndex | PrefixChange"


def lookup(prefix: Index, keys: Keys, end: int | None = None) -> int:
    """How many of the first `end` keys are cached, the leading ones: cached chains have
    no gaps.
    """
    if not keys or keys[0] not in prefix.index:
        return 0
    return bisect_left(keys, True, hi=end, key=lambda key: key not in prefix.index)


def live(prefix: Index, key: Key) -> bool:
    """Whether this content is cached and some running sequence stands on its block."""
    block = prefix.index.get(key)
    return block is not None and prefix.nodes[block].users > 0


class PrefixChange:
    """Changes to an index in the making: open, change, `done`. Never kept or shared."""

    __slots__ = ("idle", "index", "live", "next_use", "nodes", "words")

    def __init__(self, prefix: PrefixIndex) -> None:
        self.index = prefix.index.mutate()
        self.nodes = prefix.nodes.mutate()
        self.live = prefix.live
        self.idle = prefix.idle.mutate()
        self.next_use = prefix.next_use
        self.words = prefix.words.mutate()

    def done(self) -> PrefixIndex:
        """The index with all changes."""
        return PrefixIndex(
            self.index.finish(),
            self.nodes.finish(),
            self.live,
            self.idle.finish(),
            self.next_use,
            self.words.finish(),
        )

    @property
    def idlers(self) -> int:
        """As `PrefixIndex.idlers`."""
        return len(self.nodes) - self.live

    def hold(self, leaf: int) -> None:
        """One more sequence stands on `leaf`."""
        nodes = self.nodes
        while leaf != ROOT:
            key, parent, users, children, last_use = nodes[leaf]
            nodes[leaf] = _new(Node, (key, parent, users + 1, children, NONE))
            if users:
                return
            self.live += 1
            if not children:
                self._unlisted(last_use)
            leaf = parent

    def release(self, leaf: int) -> None:
        """One sequence fewer stands on `leaf`; what nobody stands on any more becomes
        idle.
        """
        nodes, block, last_use = self.nodes, leaf, self.next_use
        while block != ROOT:
            key, parent, users, children, _ = nodes[block]
            if users > 1:
                nodes[block] = _new(Node, (key, parent, users - 1, children, NONE))
                return
            self.live -= 1
            nodes[block] = _new(Node, (key, parent, 0, children, last_use))
            if block == leaf:
                self.next_use += 1
                if not children:
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
        # Its count of users stays: a holder less, a live child more.
        if new and leaf != ROOT:
            key, parent, users, children, last_use = nodes[leaf]
            nodes[leaf] = _new(Node, (key, parent, users, children + 1, last_use))
        last = len(new) - 1  # that one has no child yet
        for at, (key, block) in enumerate(zip(keys[twins:], new, strict=True)):
            index[key] = block
            nodes[block] = _new(Node, (key, leaf, 1, int(at < last), NONE))
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
        self.nodes[block] = _new(Node, (key, ROOT, 1, 0, NONE))
        self.live += 1
        return True

    def evict(self, count: int) -> Evicted:
        """Forget the `count` longest unused idle blocks, of which there are as many."""
        nodes, index = self.nodes, self.index
        gone: list[int] = []
        keys: list[Key] = []
        while len(gone) < count:
            oldest = least(self.words)
            block = self._unlisted(oldest)
            key, parent, _, _, _ = nodes.pop(block)
            while True:
                del index[key]
                gone.append(block)
                keys.append(key)
                if parent == ROOT:
                    break
                block = parent
                key, parent, users, children, last_use = nodes.pop(block)
                if children > 1 or users:
                    nodes[block] = _new(
                        Node, (key, parent, users, children - 1, last_use)
                    )
                    break
                # The last child is gone: the parent's turn, at its own last use if that
                # is later.
                if last_use > oldest or len(gone) == count:
                    last_use = max(last_use, oldest)
                    nodes[block] = _new(Node, (key, parent, 0, 0, last_use))
                    self._listed(block, last_use)
                    break
        return Evicted(tuple(gone), tuple(keys))

    def _listed(self, block: int, last_use: int) -> None:
        """From now on `block` can be evicted: it was last used at `last_use`."""
        self.idle[last_use] = block
        add(self.words, last_use)

    def _unlisted(self, last_use: int) -> int:
        """The block last used at `last_use`, which is not to be evicted any more, or just
        now.
        """
        drop(self.words, last_use)
        return self.idle.pop(last_use)

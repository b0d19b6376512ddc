"""The prefix index: which content is cached in which block, which blocks are held, and
the order of eviction.

Theory. Published blocks form a forest, whose nodes are named by the keys of their
content: a node's parent is the prefix before it. A sequence holds only the *deepest*
published block of its table, its leaf. A node's count of `users` is the sequences whose
leaf it is plus those of its children that have users, so a block is live if and only if
it has any, and holding or releasing a leaf walks up only as far as counts change between
zero and one: a shared prefix of 500 blocks costs one step to hold and to release.

Only idle blocks without cached children can be evicted, the least recently used first, so
an ancestor is never evicted before its descendants. Hence the cached part of any chain of
keys is a prefix of that chain, and a lookup is a binary search.

With a sliding window a sequence releases ancestors while it runs: blocks are published
alone, each a root, and it holds those in its window one by one. A cached chain may then
have gaps, and a hit needs only the blocks of the last window.
"""

from bisect import bisect_left
from collections.abc import Iterable
from typing import Final, TypeAlias

from attrs import Factory, frozen

from minfer.blocks.keys import Key, Keys
from minfer.values.pmap import Map
from minfer.values.tickets import Words, add, drop, least, words_of

# the parent of a first block; the leaf of a sequence that has published nothing
ROOT: Final = b""
NONE: Final = -1  # the last use of a block that is live, or was not used yet


@frozen
class Node:
    """A published block."""

    block: int
    parent: Key  # the content before it, or ROOT
    users: int
    children: int  # that are cached
    last_use: int  # a ticket: lower ones are older


# How a node is stored: its fields, in their order. It is the engine's most frequent
# value, and a plain tuple is made and unpacked in a third of a record's time. Other files
# use `Node` records only: see `node_of`.
Packed: TypeAlias = tuple[int, Key, int, int, int]


@frozen
class PrefixIndex:
    """Published blocks, by their content. The module docstring explains the fields."""

    nodes: Map[Key, Packed] = Map()
    live: int = 0  # how many of the nodes have users
    idle: Map[int, Key] = Map()  # last use -> key of an idle block without children
    next_use: int = 0  # the next ticket
    words: Words = Factory(lambda self: words_of(self.idle), takes_self=True)  # in `idle`

    @property
    def idlers(self) -> int:
        """How many blocks are cached and not held."""
        return len(self.nodes) - self.live


@frozen
class Evicted:
    """Cached blocks that are about to be overwritten, in that order."""

    blocks: tuple[int, ...] = ()
    keys: Keys = ()  # keys of their content until then


Index: TypeAlias = "PrefixIndex | PrefixChange"


def node_of(prefix: Index, key: Key) -> Node | None:
    """The block that has this content, if it is cached."""
    packed = prefix.nodes.get(key)
    return None if packed is None else Node(*packed)


def blocks_of(prefix: Index, keys: Iterable[Key]) -> tuple[int, ...]:
    """The blocks with these contents, all of which are cached."""
    return tuple([prefix.nodes[key][0] for key in keys])


def every_node(prefix: PrefixIndex) -> dict[Key, Node]:
    """All published blocks, by content."""
    return {key: Node(*packed) for key, packed in prefix.nodes.items()}


def lookup(prefix: Index, keys: Keys, end: int | None = None) -> int:
    """How many leading ones of the first `end` keys are cached: cached chains have no
    gaps.
    """
    if not keys or keys[0] not in prefix.nodes:
        return 0
    return bisect_left(keys, True, hi=end, key=lambda key: key not in prefix.nodes)


def live(prefix: Index, key: Key) -> bool:
    """Whether this content is cached and some running sequence holds its block."""
    node = node_of(prefix, key)
    return node is not None and node.users > 0


class PrefixChange:
    """A change of an index being built: open, change, `done`. Never kept or shared."""

    __slots__ = ("idle", "live", "next_use", "nodes", "words")

    def __init__(self, prefix: PrefixIndex) -> None:
        self.nodes = prefix.nodes.mutate()
        self.live = prefix.live
        self.idle = prefix.idle.mutate()
        self.next_use = prefix.next_use
        self.words = prefix.words.mutate()

    def done(self) -> PrefixIndex:
        """The index with all changes."""
        return PrefixIndex(
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

    def hold(self, leaf: Key) -> None:
        """Count one more sequence that holds `leaf`."""
        nodes = self.nodes
        while leaf:
            block, parent, users, children, last_use = nodes[leaf]
            nodes[leaf] = (block, parent, users + 1, children, NONE)
            if users:
                return
            self.live += 1
            if not children:
                self._unlisted(last_use)
            leaf = parent

    def release(self, leaf: Key) -> None:
        """Count one sequence fewer that holds `leaf`; blocks that are not held any more
        become idle.
        """
        nodes, key, last_use = self.nodes, leaf, self.next_use
        while key:
            block, parent, users, children, _ = nodes[key]
            if users > 1:
                nodes[key] = (block, parent, users - 1, children, NONE)
                return
            self.live -= 1
            nodes[key] = (block, parent, 0, children, last_use)
            if key == leaf:
                self.next_use += 1
                if not children:
                    self._listed(leaf, last_use)
                last_use = NONE  # for the ancestors, it is only known that it was before
            key = parent

    def publish(
        self, leaf: Key, keys: Keys, private: tuple[int, ...]
    ) -> tuple[Key, tuple[int, ...]]:
        """Publish full private blocks that follow `leaf` in the holder's table, one key
        each.

        Returns the holder's new leaf and the blocks that stay private because their
        content is cached already in another block (which the holder then holds instead).
        """
        twins = lookup(self, keys)
        if twins:
            twin = keys[twins - 1]
            self.hold(twin)
            self.release(leaf)
            leaf = twin
        nodes, new = self.nodes, private[twins:]
        # Its count of users stays: one holder less, one live child more.
        if new and leaf != ROOT:
            block, parent, users, children, last_use = nodes[leaf]
            nodes[leaf] = (block, parent, users, children + 1, last_use)
        last = len(new) - 1  # the last one has no child yet
        for at, (key, block) in enumerate(zip(keys[twins:], new, strict=True)):
            nodes[key] = (block, leaf, 1, int(at < last), NONE)
            leaf = key
        self.live += len(new)
        return leaf, private[:twins]

    def publish_alone(self, key: Key, block: int) -> bool:
        """Publish one private block, which its owner then holds; False if its content is
        cached.
        """
        if key in self.nodes:
            return False
        self.nodes[key] = (block, ROOT, 1, 0, NONE)
        self.live += 1
        return True

    def evict(self, count: int) -> Evicted:
        """Evict the `count` least recently used idle blocks; there must be as many."""
        nodes = self.nodes
        gone: list[int] = []
        keys: list[Key] = []
        while len(gone) < count:
            oldest = least(self.words)
            key = self._unlisted(oldest)
            block, parent, _, _, _ = nodes.pop(key)
            while True:
                gone.append(block)
                keys.append(key)
                if not parent:
                    break
                key = parent
                block, parent, users, children, last_use = nodes.pop(key)
                if children > 1 or users:
                    nodes[key] = (block, parent, users, children - 1, last_use)
                    break
                # The last child is gone: the parent can be evicted, in the order of its
                # own last use if that is later.
                if last_use > oldest or len(gone) == count:
                    last_use = max(last_use, oldest)
                    nodes[key] = (block, parent, 0, 0, last_use)
                    self._listed(key, last_use)
                    break
        return Evicted(tuple(gone), tuple(keys))

    def _listed(self, key: Key, last_use: int) -> None:
        """List this content as evictable: it was last used at `last_use`."""
        self.idle[last_use] = key
        add(self.words, last_use)

    def _unlisted(self, last_use: int) -> Key:
        """Remove the content last used at `last_use` from the evictable ones, and return
        it.
        """
        drop(self.words, last_use)
        return self.idle.pop(last_use)

"""The prefix index: which content is cached in which block, which blocks are held, and
the order of eviction. A block is a bundle of pages.

Theory. Published blocks form a forest, whose nodes are named by the keys of their
content: a node's parent is the prefix before it. A sequence holds only the *deepest*
published block of its table, its leaf. A node's count of `users` is the sequences whose
leaf it is plus those of its children that have users, so a block is live if and only if
it has any, and holding or releasing a leaf walks up only as far as counts change between
zero and one: a shared prefix of 500 blocks costs one step to hold and to release.

Only idle blocks without cached children can be evicted, the least recently used first, so
an ancestor is never evicted before its descendants. Hence the cached part of any chain of
keys is a prefix of that chain, and a lookup is a binary search.

In host memory only transfers hold blocks, and mostly at the end of a long chain that
nothing else holds. There a map has the few that are `held`, and `users` are none: blocks
before a held one have a cached child, so they are not evicted either. Then holding takes
one step whatever the length of the chain, and `idlers` has some that cannot be evicted.

Stores hold blocks of the device for a while, mostly such as sequences hold. These are
`pinned`: a small map counts that, and the node changes only if its last user leaves.

A kept state of recurrent layers is a child of the block after which it was taken, and has
no children. Only newcomers that are about to start from it and stores to tiers hold it.
So it is evicted before its block.

In a group of layers with a sliding window a sequence releases ancestors while it runs:
blocks are published alone, each a root, and it holds those in its window one by one. A
cached chain may then have gaps, and a hit needs only the blocks of the last window. The
blocks of all groups are in one index: their keys differ (`keys.group_key`).
"""

from bisect import bisect_left
from collections.abc import Container, Iterable, Sequence
from itertools import chain
from typing import Final, Protocol, TypeAlias

from attrs import Factory, frozen

from minfer.blocks.keys import Key, Keys, group_key, is_state
from minfer.values.pmap import Map
from minfer.values.tickets import Words, add, drop, pop_least, words_of

# the parent of a first block; the leaf of a sequence that has published nothing
ROOT: Final = b""
_NOTHING_HELD: Final = Map[Key, int]()
NONE: Final = -1  # the last use of a block that is live, or was not used yet

Pages: TypeAlias = tuple[int, ...]  # of one block


@frozen
class Node:
    """A published block."""

    pages: Pages
    parent: Key  # the content before it, or ROOT
    users: int
    children: int  # that are cached
    last_use: int  # a ticket: lower ones are older


# How a node is stored: its fields, in their order. It is the engine's most frequent
# value, and a plain tuple is made and unpacked in a third of a record's time. Other files
# use `Node` records only: see `node_of`.
Packed: TypeAlias = tuple[Pages, Key, int, int, int]


@frozen(slots=False)  # made in half of the time
class PrefixIndex:
    """Published blocks, by their content. The module docstring explains the fields."""

    nodes: Map[Key, Packed] = Map()
    live: int = 0  # pages of nodes with users
    idle: Map[int, Key] = Map()  # last use -> key of an idle block without children
    next_use: int = 0  # the next ticket
    words: Words = Factory(lambda self: words_of(self.idle), takes_self=True)  # in `idle`
    # pages of all nodes
    cached: int = Factory(lambda self: pages_in(self.nodes.values()), takes_self=True)
    # Keys published since they were last taken, parents first, to be stored in another
    # tier; None: they are not noted.
    unstored: Keys | None = None
    held: Map[Key, int] | None = None  # holders by block; None: `users` count them
    pinned: Map[Key, int] = Map()  # of blocks with users: holders that do not count there
    state_group: int = 0  # whose blocks are kept states; 0: there is none
    state_pages: int = 0  # of kept states

    @property
    def idlers(self) -> int:
        """How many pages are cached and have no users."""
        return self.cached - self.live


@frozen
class Evicted:
    """Cached blocks that are about to be overwritten, in that order."""

    pages: Pages = ()
    keys: Keys = ()  # keys of their content until then


Index: TypeAlias = "PrefixIndex | PrefixChange"


class BlockLookup(Protocol):
    """The keys of cached blocks, of one index or of several."""

    @property
    def nodes(self) -> Container[Key]:
        """The keys of all blocks."""
        ...


def node_of(prefix: Index, key: Key) -> Node | None:
    """The block that has this content, if it is cached."""
    packed = prefix.nodes.get(key)
    return None if packed is None else Node(*packed)


def pages_in(nodes: Iterable[Packed]) -> int:
    """The pages of all these nodes."""
    return sum(len(node[0]) for node in nodes)


def pages_of(prefix: Index, keys: Iterable[Key]) -> Pages:
    """The pages of the blocks with these contents, all of which are cached."""
    return flattened([prefix.nodes[key][0] for key in keys])


def flattened(blocks: Iterable[Pages]) -> Pages:
    """The pages of blocks, one after the other."""
    return tuple(chain.from_iterable(blocks))


def bundles(pages: Pages, size: int) -> list[Pages]:
    """Pages as blocks of `size` pages each."""
    if len(pages) == size:
        return [pages]
    return list(zip(*[iter(pages)] * size, strict=True))


def every_node(prefix: PrefixIndex) -> dict[Key, Node]:
    """All published blocks, by content."""
    return {key: Node(*packed) for key, packed in prefix.nodes.items()}


def lookup(
    prefix: BlockLookup, keys: Keys, end: int | None = None, group: int = 0
) -> int:
    """How many leading ones of the first `end` keys are cached in a group without a
    window: cached chains have no gaps.
    """
    nodes = prefix.nodes
    if not keys or group_key(keys[0], group) not in nodes:
        return 0
    return bisect_left(
        keys, True, hi=end, key=lambda key: group_key(key, group) not in nodes
    )


def count_evictable(prefix: Index, idle: Map[int, Key], max_pages: int) -> int:
    """How many pages could be evicted, counted up to `max_pages`: of the blocks `idle`
    and of those before them, as far as nothing holds them.
    """
    nodes, holders = prefix.nodes, prefix.held or _NOTHING_HELD
    if len(idle) - len(holders) >= max_pages:  # each has a page
        return max_pages
    count, children_left = 0, dict[Key, int]()  # children that stay, by parent
    for leaf in idle.values():
        key = leaf
        while key:
            pages, parent, users, children, _ = nodes[key]
            if users or key in holders or children_left.get(key, children):
                break
            count += len(pages)
            if count >= max_pages:
                return max_pages
            if parent:
                children_left[parent] = children_left.get(parent, nodes[parent][3]) - 1
            key = parent
    return count


def is_live(prefix: Index, key: Key) -> bool:
    """Whether this content is cached and some running sequence holds its block."""
    node = node_of(prefix, key)
    return node is not None and node.users > 0


class PrefixChange:
    """A change of an index being built: open, change, `done`. Never kept or shared."""

    __slots__ = (
        "cached",
        "held",
        "idle",
        "live",
        "next_use",
        "nodes",
        "pinned",
        "state_group",
        "state_pages",
        "unstored",
        "words",
    )

    def __init__(self, prefix: PrefixIndex) -> None:
        self.nodes = prefix.nodes.mutate()
        self.live = prefix.live
        self.idle = prefix.idle.mutate()
        self.next_use = prefix.next_use
        self.words = prefix.words.mutate()
        self.cached = prefix.cached
        self.unstored = prefix.unstored
        self.held = prefix.held
        self.pinned = prefix.pinned
        self.state_group = prefix.state_group
        self.state_pages = prefix.state_pages

    def done(self) -> PrefixIndex:
        """The index with all changes."""
        return PrefixIndex(
            self.nodes.finish(),
            self.live,
            self.idle.finish(),
            self.next_use,
            self.words.finish(),
            self.cached,
            self.unstored,
            self.held,
            self.pinned,
            self.state_group,
            self.state_pages,
        )

    @property
    def idlers(self) -> int:
        """As `PrefixIndex.idlers`."""
        return self.cached - self.live

    def hold(self, leaf: Key) -> None:
        """Count one more sequence that holds `leaf`."""
        if self.held is not None:
            self.held = self.held.set(leaf, self.held.get(leaf, 0) + 1)
            return
        nodes = self.nodes
        while leaf:
            pages, parent, users, children, last_use = nodes[leaf]
            nodes[leaf] = (pages, parent, users + 1, children, NONE)
            if users:
                return
            self.live += len(pages)
            if not children:
                self._unlist_idle(last_use)
            leaf = parent

    def release(self, leaf: Key) -> None:
        """Count one sequence fewer that holds `leaf`; blocks that are not held any more
        become idle.
        """
        if self.held is not None:
            self.held = self._without_holder(self.held, leaf)
            return
        nodes, key, last_use = self.nodes, leaf, self.next_use
        while key:
            pages, parent, users, children, _ = nodes[key]
            if users == 1 and key in self.pinned:
                users += self.pinned[key]
                self.pinned = self.pinned.delete(key)
            if users > 1:
                nodes[key] = (pages, parent, users - 1, children, NONE)
                return
            self.live -= len(pages)
            nodes[key] = (pages, parent, 0, children, last_use)
            if key == leaf:
                self.next_use += 1
                if not children:
                    self._list_idle(leaf, last_use)
                last_use = NONE  # for the ancestors, it is only known that it was before
            key = parent

    def pin(self, key: Key) -> None:
        """Hold a block as `hold` does, at less cost if it has users."""
        if self.nodes[key][2]:
            self.pinned = self.pinned.set(key, self.pinned.get(key, 0) + 1)
        else:
            self.hold(key)

    def unpin(self, key: Key) -> None:
        """Release a block that was held by `pin`."""
        count = self.pinned.get(key, 0)
        if not count:
            self.release(key)
        elif count == 1:
            self.pinned = self.pinned.delete(key)
        else:
            self.pinned = self.pinned.set(key, count - 1)

    def _without_holder(self, holders: Map[Key, int], key: Key) -> Map[Key, int]:
        """The held blocks with one holder of this one fewer; if it was the last one, the
        block was used last now.
        """
        if holders[key] > 1:
            return holders.set(key, holders[key] - 1)
        pages, parent, users, children, last_use = self.nodes[key]
        if not children:
            if self.idle.get(last_use) == key:
                self._unlist_idle(last_use)
            self._list_idle(key, self.next_use)
        self.nodes[key] = (pages, parent, users, children, self.next_use)
        self.next_use += 1
        return holders.delete(key)

    def publish(
        self, leaf: Key, keys: Keys, private: Sequence[Pages]
    ) -> tuple[Key, Sequence[Pages]]:
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
        nodes, new_blocks = self.nodes, private[twins:]
        if not new_blocks:
            return leaf, private
        # Its count of users stays: one holder less, one live child more.
        if leaf != ROOT:
            pages, parent, users, children, last_use = nodes[leaf]
            nodes[leaf] = (pages, parent, users, children + 1, last_use)
        last = len(new_blocks) - 1  # the last one has no child yet
        for i, (key, pages) in enumerate(zip(keys[twins:], new_blocks, strict=True)):
            nodes[key] = (pages, leaf, 1, int(i < last), NONE)
            leaf = key
        if self.unstored is not None:
            self.unstored += tuple(keys[twins:])
        count = len(new_blocks) * len(pages)
        self.live += count
        self.cached += count
        return leaf, private[:twins]

    def add_idle(self, leaf: Key, keys: Keys, blocks: Sequence[Pages]) -> None:
        """Publish blocks that follow `leaf`, none of which is cached, and that nothing
        holds; of an index with a map of `held` ones.
        """
        nodes, last_use = self.nodes, self.next_use
        if leaf != ROOT:
            pages, parent, users, children, listed = nodes[leaf]
            nodes[leaf] = (pages, parent, users, children + 1, NONE)
            if self.idle.get(listed) == leaf:
                self._unlist_idle(listed)
        last = keys[-1]
        for key, pages in zip(keys, blocks, strict=True):
            is_last = key == last
            nodes[key] = (pages, leaf, 0, int(not is_last), last_use if is_last else NONE)
            self.cached += len(pages)
            leaf = key
        self._list_idle(last, last_use)
        self.next_use += 1

    def publish_alone(self, key: Key, pages: Pages) -> bool:
        """Publish one private block, which its owner then holds; False if its content is
        cached.
        """
        if key in self.nodes:
            return False
        self.nodes[key] = (pages, ROOT, 1, 0, NONE)
        if self.unstored is not None:
            self.unstored += (key,)
        self.live += len(pages)
        self.cached += len(pages)
        return True

    def publish_state(
        self, parent: Key, key: Key, pages: Pages, *, store: bool = True
    ) -> bool:
        """Publish a state of recurrent layers as a child of the block `parent`, or of
        ROOT; nothing holds the state then. Returns False if a state with this key is kept
        already, or if the block is not cached. `store`: whether tiers will store it.
        """
        nodes, last_use = self.nodes, self.next_use
        if key in nodes or (parent != ROOT and parent not in nodes):
            return False
        if parent != ROOT:
            block, before, users, children, listed = nodes[parent]
            nodes[parent] = (block, before, users, children + 1, listed)
            if not users and not children:
                self._unlist_idle(listed)
        nodes[key] = (pages, parent, 0, 0, last_use)
        self._list_idle(key, last_use)
        self.next_use += 1
        self.cached += len(pages)
        self.state_pages += len(pages)
        if store and self.unstored is not None:
            self.unstored += (key,)
        return True

    def drop_state(self, key: Key) -> Pages:
        """Unpublish a kept state that nothing holds; returns its pages."""
        nodes = self.nodes
        pages, parent, _, _, last_use = nodes.pop(key)
        self._unlist_idle(last_use)
        self.cached -= len(pages)
        self.state_pages -= len(pages)
        if parent != ROOT:
            block, before, users, children, listed = nodes[parent]
            if not users:
                # It was last used when its state was, which need not be the oldest child.
                listed = max(listed, last_use)
            if not users and children == 1:  # as in `evict`
                self._list_idle(parent, listed)
            nodes[parent] = (block, before, users, children - 1, listed)
        return pages

    def can_evict(self, count: int) -> bool:
        """Whether `count` pages can be evicted."""
        if self.held is None or count > self.idlers:
            return count <= self.idlers
        idle = self.idle.finish()
        self.idle = idle.mutate()
        return count_evictable(self, idle, count) == count

    def evict(self, count: int) -> Evicted:
        """Evict the least recently used idle blocks, of at least `count` pages; there
        must be as many.
        """
        nodes, holders = self.nodes, self.held or _NOTHING_HELD
        evicted: list[int] = []
        keys: list[Key] = []
        while len(evicted) < count:
            oldest = pop_least(self.words)
            key = self.idle.pop(oldest)
            if key in holders:
                continue  # it is listed again when it is released
            pages, parent, _, _, _ = nodes.pop(key)
            if self.state_pages and is_state(key, self.state_group):
                self.state_pages -= len(pages)
            while True:
                evicted += pages
                keys.append(key)
                if not parent:
                    break
                key = parent
                pages, parent, users, children, last_use = nodes.pop(key)
                if children > 1 or users or key in holders:
                    nodes[key] = (pages, parent, users, children - 1, last_use)
                    break
                # The last child is gone: the parent can be evicted, in the order of its
                # own last use if that is later.
                if last_use > oldest or len(evicted) >= count:
                    last_use = max(last_use, oldest)
                    nodes[key] = (pages, parent, 0, 0, last_use)
                    self._list_idle(key, last_use)
                    break
        self.cached -= len(evicted)
        return Evicted(tuple(evicted), tuple(keys))

    def _list_idle(self, key: Key, last_use: int) -> None:
        """List this content as evictable: it was last used at `last_use`."""
        self.idle[last_use] = key
        add(self.words, last_use)

    def _unlist_idle(self, last_use: int) -> None:
        """Remove the content last used at `last_use` from the evictable ones."""
        drop(self.words, last_use)
        del self.idle[last_use]

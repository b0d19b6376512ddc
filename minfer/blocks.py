"""Who owns which block of the KV cache.

Theory. A block is in exactly one of four places:

    free       nobody knows its content: `fresh` (never used), `spare` or a run of `freed`
    private    in the table of one running sequence (or behind one fence), content still unnamed
    live       published under a content key, and some running sequence stands on it
    idle       published, nobody stands on it: kept until the space is needed

Published blocks form a forest: a node's parent is the block of the prefix before it. A sequence
holds only the *deepest* published block of its table, its leaf. `live[b]` counts the sequences
whose leaf is b plus the children of b that are live, so a block is in use if and only if it is in
`live`; holding or releasing a leaf walks up only as far as counts change between zero and one.
A prefix of 500 blocks that another sequence shares therefore costs one step to take and to give
back, and one that nobody shares costs what really changed hands.

Only idle blocks without cached children (`kids`) can be evicted, the longest unused first, so an
ancestor never goes before its descendants. Hence the cached part of any chain of keys is a prefix
of that chain, and a lookup is a binary search.

Shortage is a value: `take` returns None. Nothing here raises.
"""

from typing import Final

from attrs import evolve, frozen

from minfer.pmap import Map

Key = bytes
ROOT: Final = -1  # the parent of a first block; the leaf of a sequence that has published nothing


@frozen
class Node:
    """A published block: the digest of its content and the block of the prefix before it."""

    key: Key
    parent: int


@frozen
class Blocks:
    """Ownership of `total` blocks. Read the module's theory for the fields."""

    total: int
    fresh: int = 0  # blocks fresh..total-1 were never used
    spare: tuple[int, ...] = ()  # freed blocks, the next to be handed out
    freed: Map[int, tuple[int, ...]] = Map()  # stack of further runs of freed blocks, by depth
    free: int = 0  # how many free blocks there are, in all three
    index: Map[Key, int] = Map()  # content key -> block
    nodes: Map[int, Node] = Map()
    kids: Map[int, int] = Map()  # cached children of a node, where there are any
    live: Map[int, int] = Map()
    idle: Map[int, int] = Map()  # ticket -> idle block without children; lower tickets go first
    used: Map[int, int] = Map()  # idle block -> the ticket of its last use
    low: int = 0  # no ticket in `idle` is below
    high: int = 0  # the next ticket

    @property
    def evictable(self) -> int:
        """Blocks that are cached and that nobody stands on."""
        return len(self.nodes) - len(self.live)

    @property
    def available(self) -> int:
        """Blocks that `take` could hand out now."""
        return self.free + len(self.nodes) - len(self.live)


def new_pool(total: int) -> Blocks:
    """A pool of `total` free blocks, numbered from 0."""
    return Blocks(total=total, free=total)


def take(blocks: Blocks, count: int) -> tuple[Blocks, tuple[int, ...]] | None:
    """Hand out `count` blocks, evicting idle ones if free ones do not suffice; None if short."""
    if count <= 0:
        return blocks, ()
    if count > blocks.available:
        return None
    if count > blocks.free:
        blocks = _evict(blocks, count - blocks.free)
    spare, freed, fresh = blocks.spare, blocks.freed, blocks.fresh
    while len(spare) < count and freed:
        depth = len(freed) - 1
        spare = freed[depth] + spare
        freed = freed.delete(depth)
    short = count - len(spare)
    if short > 0:
        spare += tuple(range(fresh, fresh + short))
        fresh += short
    out, spare = spare[:count], spare[count:]
    return evolve(blocks, fresh=fresh, spare=spare, freed=freed, free=blocks.free - count), out


def give(blocks: Blocks, private: tuple[int, ...]) -> Blocks:
    """Return private blocks to the free ones."""
    if not private:
        return blocks
    freed, spare = blocks.freed, blocks.spare
    if len(spare) + len(private) <= 64:
        spare = private + spare
    else:
        freed, spare = freed.set(len(freed), spare), private
    return evolve(blocks, spare=spare, freed=freed, free=blocks.free + len(private))


def _evict(blocks: Blocks, count: int) -> Blocks:
    """Forget the `count` longest unused idle blocks; the caller knows that there are as many."""
    index, nodes = blocks.index.mutate(), blocks.nodes.mutate()
    kids, idle, used = blocks.kids.mutate(), blocks.idle.mutate(), blocks.used.mutate()
    low, gone = blocks.low, []
    for _ in range(count):
        while low not in idle:
            low += 1
        block = idle.pop(low)
        node = nodes.pop(block)
        del index[node.key]
        used.pop(block, None)
        gone.append(block)
        if node.parent == ROOT:
            continue
        left = kids.pop(node.parent) - 1
        if left:
            kids[node.parent] = left
        elif node.parent not in blocks.live:
            # The last child is gone: the parent's turn, at its own last use if that is later.
            ticket = max(low, used.get(node.parent, low))
            idle[ticket] = node.parent
            used[node.parent] = ticket
    evicted = evolve(
        blocks,
        index=index.finish(),
        nodes=nodes.finish(),
        kids=kids.finish(),
        idle=idle.finish(),
        used=used.finish(),
        low=low,
    )
    return give(evicted, tuple(gone))


def hold(blocks: Blocks, leaf: int) -> Blocks:
    """One more sequence stands on `leaf`."""
    if leaf == ROOT:
        return blocks
    count = blocks.live.get(leaf, 0)
    if count:
        return evolve(blocks, live=blocks.live.set(leaf, count + 1))
    live, idle, used = blocks.live.mutate(), blocks.idle.mutate(), blocks.used.mutate()
    block = leaf
    while block != ROOT:
        count = live.get(block, 0)
        live[block] = count + 1
        if count:
            break
        ticket = used.pop(block, None)
        if ticket is not None:
            idle.pop(ticket, None)
        block = blocks.nodes[block].parent
    return evolve(blocks, live=live.finish(), idle=idle.finish(), used=used.finish())


def release(blocks: Blocks, leaf: int) -> Blocks:
    """One sequence fewer stands on `leaf`; what nobody stands on any more becomes idle."""
    if leaf == ROOT:
        return blocks
    count = blocks.live[leaf]
    if count > 1:
        return evolve(blocks, live=blocks.live.set(leaf, count - 1))
    live, nodes = blocks.live.mutate(), blocks.nodes
    block = leaf
    while block != ROOT:
        count = live.pop(block)
        if count > 1:
            live[block] = count - 1
            break
        block = nodes[block].parent
    high, idle = blocks.high, blocks.idle
    if leaf not in blocks.kids:
        idle = idle.set(high, leaf)
    return evolve(
        blocks, live=live.finish(), idle=idle, used=blocks.used.set(leaf, high), high=high + 1
    )


def publish(
    blocks: Blocks, leaf: int, keys: tuple[Key, ...], private: tuple[int, ...]
) -> tuple[Blocks, int, tuple[int, ...]]:
    """Name full private blocks that follow `leaf` in the holder's table, one key each.

    Returns the pool, the holder's new leaf, and the blocks that stay private because their content
    is cached already under another block (the holder then stands on that one).
    """
    twins = lookup(blocks, keys)
    if twins:
        twin = blocks.index[keys[twins - 1]]
        blocks, leaf = release(hold(blocks, twin), leaf), twin
    if twins == len(keys):
        return blocks, leaf, private
    index, nodes = blocks.index.mutate(), blocks.nodes.mutate()
    kids, live = blocks.kids.mutate(), blocks.live.mutate()
    for key, block in zip(keys[twins:], private[twins:], strict=True):
        index[key] = block
        nodes[block] = Node(key, leaf)
        live[block] = 1  # and the parent's count stays: a holder less, a live child more
        if leaf != ROOT:
            kids[leaf] = kids.get(leaf, 0) + 1
        leaf = block
    blocks = evolve(
        blocks, index=index.finish(), nodes=nodes.finish(), kids=kids.finish(), live=live.finish()
    )
    return blocks, leaf, private[:twins]


def lookup(blocks: Blocks, keys: tuple[Key, ...]) -> int:
    """How many leading keys are cached: a binary search, since cached chains have no gaps."""
    low, high = 0, len(keys)
    index = blocks.index
    while low < high:
        middle = (low + high) // 2
        if keys[middle] in index:
            low = middle + 1
        else:
            high = middle
    return low

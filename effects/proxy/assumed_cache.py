"""The assumed prefix cache of a backend that does not report its cache: the blocks that
were sent there last.

Theory. The router's index needs prefixes without gaps (`minfer.routing.key_index`). The
blocks of a prompt count as used from the last one to the first: so each block was used
later than all that follow it, and what is evicted first has none that follow.
"""

from collections import OrderedDict

from attrs import define, field, frozen

from minfer.blocks.keys import Key, Keys


@frozen
class CacheUse:
    """Blocks that were added to a cache, and those that were evicted."""

    published: Keys
    evicted: Keys


@define
class AssumedCache:
    """The `max_blocks` blocks used last, of one backend."""

    max_blocks: int
    _blocks: OrderedDict[Key, None] = field(factory=OrderedDict, init=False)

    def __len__(self) -> int:
        return len(self._blocks)

    def use(self, keys: Keys) -> CacheUse:
        """Use the blocks of a prompt; of more than `max_blocks`, only the first ones."""
        blocks = self._blocks
        keys = keys[: self.max_blocks]
        published = tuple([key for key in keys if key not in blocks])
        for key in reversed(keys):
            blocks[key] = None
            blocks.move_to_end(key)
        evicted = []
        while len(blocks) > self.max_blocks:
            evicted.append(blocks.popitem(last=False)[0])
        return CacheUse(published, tuple(evicted))

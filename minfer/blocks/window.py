"""Sliding windows: which blocks of a table a query still reads.

In a group of layers with sink tokens, queries read the first blocks of a sequence as
well, however far the window is. So what is released of a table is a range in its middle:
from the first block after the sinks to the first one of the window.
"""

from collections.abc import Sequence
from typing import Final, TypeVar

from minfer.blocks.keys import Keys, group_key
from minfer.blocks.prefix import BlockLookup
from minfer.values.log import Log

T = TypeVar("T")
GONE: Final = -1  # in a table: the entry of a released page


def outside(position: int, window: int, block_size: int) -> int:
    """How many leading blocks no query from `position` on reads; none if `window`
    is 0.
    """
    return max(0, position + 1 - window) // block_size if window else 0


def unreleased(
    blocks: Sequence[T] | Log[T], start: int, stop: int, low: int, sinks: int
) -> tuple[T, ...]:
    """Of the items `start` to `stop` - 1 those that are not released: an item for each
    block, of which the first `sinks` and those from `low` on are not released.
    """
    behind = tuple(blocks[max(start, low, sinks) : stop])
    return (*blocks[start : min(stop, sinks)], *behind) if start < sinks else behind


def lookup_window(
    prefix: BlockLookup,
    keys: Keys,
    end: int,
    window: int,
    block_size: int,
    group: int = 0,
    sinks: int = 0,
) -> int:
    """The most of the first `end` keys after which all blocks that the next query reads
    are cached in a group whose first `sinks` blocks have sink tokens.
    """
    for block in range(min(sinks, end)):
        if group_key(keys[block], group) not in prefix.nodes:
            end = block
            break
    # Blocks before it that a query at a block's start reads.
    span = -(-(window - 1) // block_size)
    hit = block = end
    while block > max(0, hit - span):
        block -= 1
        if group_key(keys[block], group) not in prefix.nodes:
            hit = block
    return hit

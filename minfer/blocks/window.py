"""Sliding windows: which blocks of a table a query still reads."""

from typing import Final

from minfer.blocks.keys import Keys, group_key
from minfer.blocks.prefix import Index

GONE: Final = -1  # in a table: the entry of a released page


def outside(position: int, window: int, block_size: int) -> int:
    """How many leading blocks no query from `position` on reads; none if `window`
    is 0.
    """
    return max(0, position + 1 - window) // block_size if window else 0


def lookup_window(
    prefix: Index, keys: Keys, end: int, window: int, block_size: int, group: int = 0
) -> int:
    """The most of the first `end` keys after which all blocks that the next query reads
    are cached in a group.
    """
    # Blocks before it that a query at a block's start reads.
    span = -(-(window - 1) // block_size)
    found = at = end
    while at > max(0, found - span):
        at -= 1
        if group_key(keys[at], group) not in prefix.nodes:
            found = at
    return found

"""Sliding windows: which blocks of a table a query still reads."""

from itertools import islice
from typing import Final

from minfer.blocks.keys import Keys
from minfer.blocks.prefix import PrefixIndex

GONE: Final = -1  # in a table: the entry of a released block


def outside(position: int, window: int, block_size: int) -> int:
    """How many leading blocks no query from `position` on reads; none if `window`
    is 0.
    """
    return max(0, position + 1 - window) // block_size if window else 0


def lookup_window(
    prefix: PrefixIndex, keys: Keys, end: int, window: int, block_size: int
) -> int:
    """The most of the first `end` keys after which all blocks that the next query reads
    are cached.
    """
    # Blocks before it that a query at a block's start reads.
    span = -(-(window - 1) // block_size)
    cached = bytes(map(prefix.nodes.__contains__, islice(keys, end)))
    found = cached.rfind(b"\1" * span)
    if found >= 0:
        return found + span
    # Near the beginning there are fewer to read.
    return len(cached) - len(cached.lstrip(b"\1"))

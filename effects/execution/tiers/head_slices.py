"""How a KV block is divided between the ranks of engines that exchange it.

Theory. A tensor parallel rank has a block's keys and values of its own key heads. Engines
of different sizes have different heads on a rank, so a block is exchanged in *slices* of
as few heads as any rank has, each under a key of its own. With 8 key heads, an engine of
2 ranks that computes prompts, and one of 4 that decodes:

    sends      rank 0: slices 0, 1           rank 1: slices 2, 3
    receives   rank 0: 0     rank 1: 1       rank 2: 2     rank 3: 3

Where there are more ranks than key heads, several have the same slice: the first of them
sends it, and all of them receive it. Latents (MLA) are whole on all ranks: one slice.

A state of recurrent layers is not divided by key heads. Beside these, all engines have as
many ranks, and what a rank has of a block is one slice.
"""

from collections.abc import Iterable
from math import gcd, lcm
from typing import Final

from attrs import frozen

from minfer.blocks.keys import Key
from minfer.effects.models.ranks import RankInfo


@frozen
class HeadSlices:
    """The slices of a block, and those of one rank."""

    count: int = 1  # of a block
    own: tuple[int, ...] = (0,)  # that this rank has
    sent: tuple[int, ...] = (0,)  # of these, those that it sends

    @classmethod
    def of(cls, rank_info: RankInfo, heads: int, sizes: Iterable[int]) -> "HeadSlices":
        """Returns the slices of a rank; `heads` are the key heads of the whole model, or
        1 with latents, and `sizes` the tensor parallel sizes of all engines.
        """
        # A size that is less than the heads divides them, and they divide a larger one.
        count, ranks = gcd(heads, lcm(*sizes)), rank_info.parallel.tensor
        own_slices = [
            n for n in range(count) if rank_info.tensor_rank in holders(n, count, ranks)
        ]
        sent = [
            n for n in own_slices if holders(n, count, ranks)[0] == rank_info.tensor_rank
        ]
        return cls(count, tuple(own_slices), tuple(sent))

    @classmethod
    def by_rank(cls, rank_info: RankInfo) -> "HeadSlices":
        """Returns the slices where each rank exchanges all that it has of a block."""
        own_slice = (rank_info.tensor_rank,)
        return cls(rank_info.parallel.tensor, own_slice, own_slice)

    def key(self, key: Key, number: int) -> Key:
        """Returns the key of a block's slice."""
        return bytes((number,)) + key if self.count > 1 else key

    def number(self, key: Key) -> int:
        """Returns which slice such a key is of."""
        return key[0] if self.count > 1 else 0


def holders(number: int, count: int, ranks: int) -> range:
    """Returns which of an engine's ranks have a slice, of `count` slices."""
    first = number * ranks // count
    return range(first, max(first + 1, (number + 1) * ranks // count))


WHOLE_BLOCK: Final = HeadSlices()

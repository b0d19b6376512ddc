"""The work of expanded_latents.py in a step, without Triton."""

from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

TOKENS_AT_ONCE: Final = 1 << 16  # tokens whose slots are found at once: some 5 MB


class ExpandedWork(NamedTuple):
    """Chunks whose latents are expanded: prepared once per step, the same in all
    layers.
    """

    bounds: Tensor  # [chunks + 1] int32: starts among the chunks' queries, and the end
    history: Tensor  # [chunks + 1] int32: the same of the tokens before the chunks
    slots: Tensor  # [tables, history] int32: where the latents of those tokens are
    longest: int  # the largest count
    by_flash: bool = False  # whether flash-attn serves them: there is one chunk

    @classmethod
    def of(
        cls,
        rows: Tensor,
        starts: Tensor,
        counts: Tensor,
        table: Tensor,
        longest: int,
        history: int,
        block_size: int,
    ) -> "ExpandedWork":
        """Build from arguments as in `prefill_attention`, but a table for each page of a
        block; chunks are consecutive from query 0 on. There are at most `history` tokens
        before them, in all.
        """
        before, slots = _bounds(starts), table.new_empty(len(table), history)
        for first in range(0, history, TOKENS_AT_ONCE):
            last = min(first + TOKENS_AT_ONCE, history)
            token = torch.arange(first, last, dtype=torch.int32, device=rows.device)
            chunk = torch.searchsorted(before[1:], token, right=True)
            chunk = chunk.clamp(max=len(rows) - 1)
            real, position = token < before[-1], token - before[chunk]
            block = torch.where(real, position // block_size, 0)
            pages = table[:, rows[chunk], block]
            token_slots = pages * block_size + position % block_size
            slots[:, first:last] = torch.where(real, token_slots, 0)
        return cls(_bounds(counts), before, slots, longest)

    def piece(self, first: int, size: int) -> Tensor:
        """Returns the bounds [chunks + 1] of the chunks among `size` tokens of the
        history from `first` on.
        """
        return self.history.clamp(first, first + size) - first


def _bounds(counts: Tensor) -> Tensor:
    return F.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))

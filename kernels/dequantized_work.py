"""The work of dequantized_contexts.py in a step, without Triton."""

from typing import NamedTuple

import torch
from torch import Tensor


class DequantizedWork(NamedTuple):
    """Chunks whose contexts are dequantized: prepared once per step, the same in all
    layers.

    A workspace holds the blocks of all these contexts, one context after the other. It is
    read as a cache of its own: chunk i is row i of `table`.
    """

    chunks: Tensor  # [workspace blocks] int32: the chunk of each; -1: not used
    firsts: Tensor  # [chunks] int32: the first workspace block of each
    rows: Tensor  # [chunks] int32: of the cache's block table
    starts: Tensor  # [chunks] int32: the position of the first query
    table: Tensor  # [chunks, max_blocks] int32: workspace blocks
    own_rows: Tensor  # [chunks] int32: the rows of `table`

    @classmethod
    def of(
        cls,
        rows: Tensor,
        starts: Tensor,
        counts: Tensor,
        max_blocks: int,
        blocks: int,
        block_size: int,
    ) -> "DequantizedWork":
        """Build from arguments as in `prefill_attention`, for tables of `max_blocks` and
        a workspace of `blocks` blocks, which hold all contexts.
        """
        contexts = torch.where(counts > 0, starts + counts, 0)
        used = (contexts + block_size - 1) // block_size
        ends = used.cumsum(0, dtype=torch.int32)
        firsts = ends - used.int()
        place = torch.arange(blocks, dtype=torch.int32, device=rows.device)
        chunks = torch.searchsorted(ends, place, right=True, out_int32=True)
        chunks = torch.where(place < ends[-1], chunks, -1)
        own_rows = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
        numbers = torch.arange(max_blocks, dtype=torch.int32, device=rows.device)
        # Behind a context entries are never read: they only stay in the workspace.
        table = (firsts[:, None] + numbers).clamp(max=blocks - 1)
        return cls(chunks, firsts, rows.int(), starts.int(), table, own_rows)

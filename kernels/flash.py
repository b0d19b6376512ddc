"""Attention of long chunks by flash-attn's kernels (package flash-attn-4), where it is installed.

Hopper's asynchronous copies and products: 600 TFLOP/s and more where Triton's kernel has 430. Whole
tiles of keys are read, and what is hidden gets a weight of zero, but 0 * NaN is NaN. In blocks of
64 tokens and less, what is behind a context does not reach the result (measured); in blocks of 128
it does, and with a window what is before it may. Neither is served: a request's overflow must not
harm another's.
"""

from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor

from minfer.kernels.packages import FLASH, missing


def flash_missing(head_dim: int, dtype: torch.dtype, block_size: int, device: torch.device) -> str:
    """Why `flash_attention` cannot serve such a cache on this device; empty if it can."""
    why = missing(FLASH, dtype, device)
    if not why and (head_dim % 8 or head_dim > 128 or block_size not in (16, 32, 64)):
        why = f"heads of {head_dim} in blocks of {block_size} tokens are none of flash-attn's"
    return why


class FlashWork(NamedTuple):
    """Chunks as flash-attn wants them: prepared once a step, the same in all layers."""

    bounds: Tensor  # [chunks + 1] int32: where chunks begin among the queries, and the end
    contexts: Tensor  # [chunks] int32: tokens up to a chunk's last
    table: Tensor | None  # [chunks, max_blocks] int32; None: contexts are the chunks themselves
    longest: int  # count

    @classmethod
    def of(
        cls, rows: Tensor, starts: Tensor, counts: Tensor, table: Tensor, longest: int,
        whole: bool = False) -> "FlashWork":  # fmt: skip
        """Arguments as in `prefill_attention`; chunks lie one after another from query 0 on.

        whole: all start at position 0, and their keys and values are given as they are."""
        bounds = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        return cls(bounds, (starts + counts).int(), None if whole else table[rows], longest)


def flash_attention(
    work: FlashWork, q: Tensor, keys: Tensor, values: Tensor, scale: float, out: Tensor
) -> None:
    """`prefill_attention` of `work` into `out`: as q in shape, all with strides of 16 bytes.

    Keys and values are the cache's, or without a table [tokens, kv_heads, head_dim]: on an H200,
    chunks of 2,048 and 8,192 tokens took 0.92 and 0.90 of the time so (7B's heads, 2026-11-22)."""
    bounds, longest = work.bounds, work.longest
    where = {"seqused_k": work.contexts, "page_table": work.table} if work.table is not None else {
        "cu_seqlens_k": bounds, "max_seqlen_k": longest}  # fmt: skip
    import_module(FLASH)._flash_attn_fwd(  # the public function fills no tensor of its caller's
        q, keys, values, cu_seqlens_q=bounds, max_seqlen_q=longest, softmax_scale=scale,
        causal=True, out=out, **where)  # fmt: skip

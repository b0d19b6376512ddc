"""Attention of long chunks by flash-attn's kernels (package flash-attn-4), if it is
installed.

Hopper's asynchronous copies and products: 600 TFLOP/s and more, where Triton's kernel has
430; with heads of 256 dimensions, 702 and 422 in a chunk of 8,192 tokens (H200,
2026-12-01). Whole tiles of keys are read, and masked keys get a weight of zero, but 0 *
NaN is NaN. In blocks of 64 tokens and less, values after a context do not reach the
result (measured); in blocks of 128 they do, and with a window values before it may.
Neither is served: an overflow in one request must not affect another.
"""

from importlib import import_module
from typing import Final, NamedTuple

import torch
from torch import Tensor

from minfer.kernels.packages import FLASH, missing

WIDE_HEAD: Final = 256  # the one size above 128 that was measured


def flash_missing(
    head_dim: int, dtype: torch.dtype, block_size: int, device: torch.device
) -> str:
    """Why `flash_attention` cannot serve such a cache on this device; empty if it can."""
    reason = missing(FLASH, dtype, device)
    served = head_dim % 8 == 0 and (head_dim <= 128 or head_dim == WIDE_HEAD)
    if not reason and not (served and block_size in (16, 32, 64)):
        return (
            f"heads of {head_dim} in blocks of {block_size} tokens are none of "
            "flash-attn's"
        )
    return reason


def flash_piece_missing(
    key_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device
) -> str:
    """Why `flash_piece` cannot serve such keys and values; empty if it can."""
    reason = missing(FLASH, dtype, device)
    if not reason and (max(key_dim, value_dim) > 256 or key_dim % 8 or value_dim % 8):
        return f"keys of {key_dim} and values of {value_dim} are none of flash-attn's"
    return reason


def flash_piece(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    *,
    causal: bool,
    out: Tensor,
    sums: Tensor,
) -> None:
    """`piece_attention` (expanded_latents.py) of one chunk, to which all queries and keys
    belong, so that no key beside them is another sequence's: q [tokens, heads, key_dim],
    keys [keys, heads, key_dim], values [keys, heads, value_dim], strides of 16 bytes.

    sums [tokens, heads] float32, the tokens of a head side by side.
    """
    import_module(FLASH)._flash_attn_fwd(
        q[None],
        keys[None],
        values[None],
        softmax_scale=scale,
        causal=causal,
        out=out[None],
        lse=sums.t()[None],
        return_lse=True,
    )


class FlashWork(NamedTuple):
    """Chunks in flash-attn's format: prepared once per step, the same in all layers."""

    bounds: Tensor  # [chunks + 1] int32: starts among the queries, and the end
    contexts: Tensor  # [chunks] int32: tokens up to a chunk's last
    table: Tensor  # [tables, chunks, max_blocks] int32
    longest: int  # the largest count

    @classmethod
    def of(
        cls, rows: Tensor, starts: Tensor, counts: Tensor, table: Tensor, longest: int
    ) -> "FlashWork":
        """Build from arguments as in `prefill_attention`, but a table for each page of a
        block; chunks are consecutive from query 0 on.
        """
        bounds = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        return cls(bounds, (starts + counts).int(), table[:, rows], longest)


def flash_attention(
    work: FlashWork,
    table: int,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scale: float,
    out: Tensor,
) -> None:
    """`prefill_attention` of `work` by one of its tables into `out`: as q in shape, both
    with strides of 16 bytes.
    """
    # The public function would allocate the output itself.
    import_module(FLASH)._flash_attn_fwd(
        q,
        k_cache,
        v_cache,
        cu_seqlens_q=work.bounds,
        seqused_k=work.contexts,
        max_seqlen_q=work.longest,
        page_table=work.table[table],
        softmax_scale=scale,
        causal=True,
        out=out,
    )

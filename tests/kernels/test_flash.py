"""What flash-attn is given, by a stand-in with its signature; on a GPU that has it,
itself.
"""

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from minfer.kernels import flash
from minfer.kernels.attention import attention_reference
from minfer.kernels.expanded_latents import piece_reference
from minfer.kernels.flash import (
    FlashWork,
    flash_attention,
    flash_missing,
    flash_piece,
    flash_piece_missing,
)
from minfer.kernels.packages import FLASH
from tests.kernels.test_attention import CUDA, DEVICE, close, make, queries, written_out

REAL = flash_missing(64, torch.float16, 16, torch.device(DEVICE)) == ""


def stand_in(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    max_seqlen_q: int,
    page_table: Tensor,
    softmax_scale: float,
    causal: bool,
    out: Tensor,
) -> None:
    """flash-attn's meaning: chunk i ends at its context's end, and is masked
    from there.
    """
    for tensor in (cu_seqlens_q, seqused_k, page_table):
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()
    assert len(page_table) == len(seqused_k) == len(cu_seqlens_q) - 1
    counts = cu_seqlens_q[1:] - cu_seqlens_q[:-1]
    assert causal
    assert counts.max() <= max_seqlen_q
    attention_reference(
        q,
        k,
        v,
        page_table,
        torch.arange(len(counts), device=counts.device),
        seqused_k - counts,
        counts,
        cu_seqlens_q[:-1],
        softmax_scale,
        0,
        out,
    )


def of_piece(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    out: Tensor,
    lse: Tensor,
    return_lse: bool,
) -> None:
    """flash-attn's meaning without pages: a causal mask ends at the last key."""
    assert return_lse
    assert lse.is_contiguous()
    assert lse.dtype == torch.float32
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * softmax_scale
    if causal:
        count, keys = scores.shape[2:]
        unseen = torch.ones(count, keys, dtype=torch.bool).triu_(1 + keys - count)
        scores.masked_fill_(unseen.to(q.device), -math.inf)
    lse.copy_(scores.logsumexp(-1))
    out.copy_(torch.einsum("bhqk,bkhv->bqhv", scores.softmax(-1), v.float()))


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:Argument aux_data"
)  # its own
@pytest.mark.parametrize("causal", [False, True])
def test_a_piece_of_expanded_latents(
    causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not REAL:
        monkeypatch.setitem(sys.modules, FLASH, SimpleNamespace(_flash_attn_fwd=of_piece))
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(DEVICE, torch.float16)

    count, keys = 40, 40 if causal else 150
    q, expanded, rotated = normal(count, 2, 192), normal(keys, 2, 256), normal(keys, 64)
    keys_with_rope = torch.cat(
        (expanded[..., :128], rotated[:, None].expand(-1, 2, -1)), 2
    )
    out, expected = torch.zeros(2, count, 2, 128, dtype=q.dtype, device=DEVICE)
    sums = torch.zeros(2, count, device=DEVICE).t()
    values, scale = expanded[..., 128:], 0.1
    flash_piece(q, keys_with_rope, values, scale, causal=causal, out=out, sums=sums)
    bounds = torch.tensor([0, count]), torch.tensor([0, keys])
    logs = torch.zeros_like(sums)
    piece_reference(q, expanded, rotated, *bounds, scale, causal, expected, logs)
    torch.testing.assert_close(out, expected, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(sums, logs, rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:Argument aux_data"
)  # its own
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("decode", [False, True])
def test_chunks_and_rows_of_one_token(
    decode: bool, block_size: int, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not REAL:
        monkeypatch.setitem(sys.modules, FLASH, SimpleNamespace(_flash_attn_fwd=stand_in))
    starts = [0, 63, 17, 3, 130]
    counts = [1] * 5 if decode else [37, 1, 20, 0, 300 if CUDA else 9]
    contexts = [start + count for start, count in zip(starts, counts, strict=True)]
    case = make(contexts, 2, head_dim, block_size, torch.float16)
    k_cache, v_cache = case.k_cache, case.v_cache  # NaN behind every context
    padded = queries(sum(counts) + 3, 14, case)
    q, out = (
        padded[3:],
        torch.full(padded.shape, math.nan, dtype=padded.dtype, device=DEVICE),
    )
    bounds = [
        torch.tensor(values, dtype=torch.int32, device=DEVICE)
        for values in (starts, counts)
    ]
    tables = torch.stack((torch.full_like(case.table, -1), case.table))
    work = FlashWork.of(case.rows, bounds[0], bounds[1], tables, max(counts))
    flash_attention(work, 1, q, k_cache, v_cache, 0.1, out[3:])
    offset = 3
    for start, count, key, value in zip(
        starts, counts, case.keys, case.values, strict=True
    ):
        tokens = slice(offset, offset + count)
        close(out[tokens], written_out(padded[tokens], key, value, start, 0.1))
        offset += count
    assert out[:3].isnan().all()


def test_why_it_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, gpu = torch.bfloat16, torch.device("cuda")
    monkeypatch.setattr(flash, "missing", lambda *_: "not here")
    assert flash_piece_missing(192, 128, kind, gpu) == "not here"
    assert flash_missing(128, kind, 64, gpu) == "not here"
    monkeypatch.setattr(flash, "missing", lambda *_: "")
    assert "heads of 100" in flash_missing(100, kind, 64, gpu)
    assert "heads of 192" in flash_missing(192, kind, 64, gpu)
    for size in (24, 128):
        assert f"blocks of {size}" in flash_missing(128, kind, size, gpu)
    for head_dim in (128, 256):
        assert flash_missing(head_dim, kind, 64, gpu) == ""
    for dims in ((264, 128), (192, 100), (100, 128), (8, 264)):
        assert f"keys of {dims[0]}" in flash_piece_missing(*dims, kind, gpu)
    assert flash_piece_missing(192, 128, kind, gpu) == ""

"""What flash-attn is given, by a stand-in with its signature; on a GPU that has it, itself."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from minfer.kernels import flash
from minfer.kernels.attention import attention_reference
from minfer.kernels.flash import FlashWork, flash_attention, flash_missing
from minfer.kernels.packages import FLASH
from tests.kernels.test_attention import CUDA, DEVICE, close, make, queries, written_out

REAL = flash_missing(64, torch.float16, 16, torch.device(DEVICE)) == ""


def stand_in(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, max_seqlen_q: int,
    softmax_scale: float, causal: bool, out: Tensor, seqused_k: Tensor | None = None,
    page_table: Tensor | None = None, cu_seqlens_k: Tensor | None = None, max_seqlen_k: int = 0,
) -> None:  # fmt: skip
    """flash-attn's meaning: chunk i ends at its context's end, and is masked from there."""
    counts = cu_seqlens_q[1:] - cu_seqlens_q[:-1]
    if seqused_k is None or page_table is None:  # as blocks of one token
        assert cu_seqlens_k is cu_seqlens_q
        assert max_seqlen_k == max_seqlen_q
        seqused_k, longest = counts, int(counts.max())
        page_table = (cu_seqlens_k[:-1, None] + torch.arange(longest)).clamp(max=len(k) - 1).int()
        k, v = k[:, None], v[:, None]
    for given in (cu_seqlens_q, seqused_k, page_table):
        assert given.dtype == torch.int32
        assert given.is_contiguous()
    assert len(page_table) == len(seqused_k) == len(cu_seqlens_q) - 1
    assert causal
    assert counts.max() <= max_seqlen_q
    attention_reference(
        q, k, v, page_table, torch.arange(len(counts)), seqused_k - counts, counts,
        cu_seqlens_q[:-1], softmax_scale, 0, out,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Argument aux_data")  # its own
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("decode", [False, True])
def test_chunks_and_rows_of_one_token(
    decode: bool, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not REAL:
        monkeypatch.setitem(sys.modules, FLASH, SimpleNamespace(_flash_attn_fwd=stand_in))
    starts = [0, 63, 17, 3, 130]
    counts = [1] * 5 if decode else [37, 1, 20, 0, 300 if CUDA else 9]
    contexts = [start + count for start, count in zip(starts, counts, strict=True)]
    case = make(contexts, 2, 64, block_size, torch.float16)
    k_cache, v_cache = case.k_cache, case.v_cache  # NaN behind every context
    both = queries(sum(counts) + 3, 14, case)
    q, out = both[3:], torch.full(both.shape, math.nan, dtype=both.dtype, device=DEVICE)
    given = [torch.tensor(part, dtype=torch.int32, device=DEVICE) for part in (starts, counts)]
    work = FlashWork.of(case.rows, given[0], given[1], case.table, max(counts))
    flash_attention(work, q, k_cache, v_cache, 0.1, out[3:])
    at = 3
    for start, count, key, value in zip(starts, counts, case.keys, case.values, strict=True):
        here = slice(at, at + count)
        close(out[here], written_out(both[here], key, value, start, 0.1))
        at += count
    assert out[:3].isnan().all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Argument aux_data")  # its own
def test_whole_contexts_are_read_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    if not REAL:
        monkeypatch.setitem(sys.modules, FLASH, SimpleNamespace(_flash_attn_fwd=stand_in))
    counts = [37, 1, 20, 300 if CUDA else 9]
    case = make(counts, 2, 64, 16, torch.float16)
    total, ends = sum(counts), [37, 38, 58]
    qkv = torch.randn(3 + total, 14 + 2 + 2, 64, device=DEVICE).half()
    out = torch.full((3 + total, 14, 64), math.nan, dtype=torch.float16, device=DEVICE)
    q, keys, values = qkv[3:, :14], qkv[3:, 14:16], qkv[3:, 16:]
    given = [torch.tensor(part, dtype=torch.int32, device=DEVICE) for part in ([0] * 4, counts)]
    work = FlashWork.of(case.rows, given[0], given[1], case.table, max(counts), whole=True)
    assert work.table is None
    flash_attention(work, q, keys, values, 0.1, out[3:])
    wide = keys.double().cpu(), values.double().cpu()
    parts = (torch.tensor_split(one, ends) for one in (out[3:], q, *wide))
    for found, query, key, value in zip(*parts, strict=True):
        close(found, written_out(query, key, value, 0, 0.1))
    assert out[:3].isnan().all()


def test_why_it_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, gpu = torch.bfloat16, torch.device("cuda")
    monkeypatch.setattr(flash, "missing", lambda *_: "not here")
    assert flash_missing(128, kind, 64, gpu) == "not here"
    monkeypatch.setattr(flash, "missing", lambda *_: "")
    assert "heads of 100" in flash_missing(100, kind, 64, gpu)
    assert "heads of 256" in flash_missing(256, kind, 64, gpu)
    for size in (24, 128):
        assert f"blocks of {size}" in flash_missing(128, kind, size, gpu)
    assert flash_missing(128, kind, 64, gpu) == ""

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
from minfer.kernels.flash import FlashWork, flash_attention, flash_missing
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
    for given in (cu_seqlens_q, seqused_k, page_table):
        assert given.dtype == torch.int32
        assert given.is_contiguous()
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


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:Argument aux_data"
)  # its own
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
    given = [
        torch.tensor(part, dtype=torch.int32, device=DEVICE) for part in (starts, counts)
    ]
    tables = torch.stack((torch.full_like(case.table, -1), case.table))
    work = FlashWork.of(case.rows, given[0], given[1], tables, max(counts))
    flash_attention(work, 1, q, k_cache, v_cache, 0.1, out[3:])
    at = 3
    for start, count, key, value in zip(
        starts, counts, case.keys, case.values, strict=True
    ):
        here = slice(at, at + count)
        close(out[here], written_out(both[here], key, value, start, 0.1))
        at += count
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

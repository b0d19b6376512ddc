"""Capped scores in attention kernels, and capped and scaled logits."""

from typing import Any

import pytest
import torch

from minfer.kernels import plain
from minfer.kernels.attention import attention_reference
from minfer.kernels.attention_tunes import DecodeTune
from minfer.kernels.cache_numbers import FP8
from minfer.kernels.scaled_logits import scale_logits
from tests.circles import long
from tests.kernels.test_attention import (
    DEVICE,
    SMALL,
    TYPES,
    check_draft_layout,
    chunk_tensors,
    close,
    decode,
    make,
    prefill,
    queries,
    written_out,
)

pytestmark = pytest.mark.usefixtures("poisoned")
CAPS = [0.5, *long([50.0])]  # scores are near 1


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("window", [0, *long([9])])
@pytest.mark.parametrize("splits", [3, *long([1])])
def test_decode(cap: float, window: int, splits: int) -> None:
    case = make([1, 40, 17], 1)
    q = queries(3, 2, case)
    out = decode(
        case, q, splits=splits, window=window, cap=cap, tune=DecodeTune(16, 4, 3)
    )
    for i, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        want = written_out(
            q[i : i + 1], keys, values, len(keys) - 1, 64**-0.5, window, 0, cap
        )
        close(out[i : i + 1], want)


@pytest.mark.parametrize("dtype", [torch.float16, *long([torch.float32])])
@pytest.mark.parametrize("splits", [1, *long([2])])
@pytest.mark.parametrize("window", [12, *long([0])])
def test_chunks(window: int, splits: int, dtype: torch.dtype) -> None:
    chunks, offsets = [(0, 20), (25, 9)], [0, 20]
    case = make([start + count for start, count in chunks], 1, dtype=dtype)
    q = queries(29, 2, case)
    reads = {"window": window, "splits": splits, "cap": 0.5}
    out = prefill(case, q, chunks, offsets, max_count=20, tune=SMALL, **reads)
    for i, ((start, count), offset) in enumerate(zip(chunks, offsets, strict=True)):
        tokens = slice(offset, offset + count)
        pair = case.keys[i], case.values[i]
        close(out[tokens], written_out(q[tokens], *pair, start, 64**-0.5, window, 0, 0.5))


@pytest.mark.long
def test_reference_and_drafts_agree() -> None:
    check_draft_layout(make([7, 63], 1), [(3, 4), (60, 3)], cap=0.5)


@pytest.mark.long
def test_caches_in_eight_bits() -> None:
    case = make([40, 17], 1, dtype=torch.float16)
    q, options = queries(2, 2, case), {"splits": 1, "cap": 0.5}
    case.k_cache, case.v_cache = case.k_cache.to(FP8), case.v_cache.to(FP8)
    out = decode(case, q, **options)
    caches = case.k_cache, case.v_cache, case.table, case.rows
    places = chunk_tensors([(39, 1), (16, 1)], [0, 1])
    reference = attention_reference(q, *caches, *places, 64**-0.5, cap=0.5)
    close(out, reference.double().cpu())


def test_scores_far_beyond_the_cap_are_the_cap() -> None:
    case = make([40], 1, dtype=torch.float16)
    q = queries(1, 2, case) * 1000
    out = decode(case, q, splits=1, cap=3.0)
    close(out, written_out(q, case.keys[0], case.values[0], 39, 64**-0.5, 0, 0, 3.0))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("scale", "cap"), [(0.25, None), (1.0, 3.0), (0.5, 30.0)])
def test_logits(dtype: torch.dtype, scale: float, cap: float | None) -> None:
    """In place, whatever their stride; far beyond the cap, too."""
    drawn = torch.randn(3, 6000, device=DEVICE) * 20
    drawn[0, :2] = torch.tensor([1e4, -1e4])
    stored = drawn.to(dtype)
    logits = stored[:, :5000]
    want = logits.double() * scale
    want = want if cap is None else (want / cap).tanh() * cap
    beside = stored[:, 5000:].clone()
    scale_logits(logits, scale, cap)
    torch.testing.assert_close(logits, want.to(dtype), rtol=1e-3, atol=1e-5)
    assert torch.equal(stored[:, 5000:], beside)
    scale_logits(logits[:0], scale, cap)


def test_logits_of_the_cpu() -> None:
    options: Any = {"scale": 0.5, "cap": 3.0}
    logits = torch.randn(2, 50, device=DEVICE) * 5
    ours = logits.clone()
    scale_logits(logits, **options)
    plain.scale_logits(ours, **options)
    torch.testing.assert_close(ours, logits)

"""KV caches in 8 bits: what is stored, and the kernels that write and read them."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from minfer.kernels import plain, rope
from minfer.kernels.attention import DraftLayout, decode_attention, prefill_attention
from minfer.kernels.cache_numbers import (
    FP8,
    INT8,
    CacheScales,
    as_bytes,
    dequantize,
    quantize,
)
from minfer.kernels.latent_cache import _write_reference, write_latent
from minfer.kernels.leaves import Norm
from minfer.kernels.mla import latent_decode
from tests.kernels.test_attention import DEVICE, Case, make, queries, written_out

# Queries of bfloat16 over FP8 are multiplied in float16, which the interpreter can.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
KINDS = [(FP8, torch.float16), (FP8, torch.bfloat16), (INT8, HALF)]
LIMIT = {torch.float16: 2e-3, torch.bfloat16: 2e-2}


def e4m3() -> Tensor:
    """All finite numbers of FP8 from 0 on, by the definition of their bits: 4 of the
    exponent with a bias of 7, and 3 of the fraction.
    """
    below = [i / 8 * 2.0**-6 for i in range(8)]
    above = [(1 + i / 8) * 2.0 ** (e - 7) for e in range(1, 16) for i in range(8)]
    return torch.tensor(below + above[:-1], dtype=torch.float64)  # the last one is NaN


def test_fp8_is_the_nearest_number_and_saturates() -> None:
    table = e4m3()
    x = torch.cat((torch.linspace(-500, 500, 20_001), torch.randn(5000) * 0.02))
    numbers, scales = quantize(x, FP8)
    assert scales is None
    found = dequantize(numbers, None, torch.float64)
    wide = x.double().abs().clamp(max=448)
    best = (wide[:, None] - table).abs().min(1).values
    assert torch.equal((found.abs() - wide).abs(), best)
    assert torch.equal(found.sign(), x.double().sign() * (found != 0))
    middle = (table[1:] + table[:-1]) / 2  # halfway: the number whose last bit is 0
    halfway = quantize(middle.float(), FP8)[0].view(torch.uint8)
    assert not (halfway & 1).any()
    odd = quantize(torch.tensor([math.nan, math.inf, -math.inf]), FP8)[0].float()
    assert odd[0].isnan()
    assert odd[1:].tolist() == [448, -448]


@pytest.fixture
def flushing() -> Iterator[None]:
    """The processor treats subnormal numbers of float32 as 0."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush subnormal numbers")
    yield
    torch.set_flush_denormal(False)


def test_all_numbers_of_fp8_are_dequantized() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(FP8)
    found = dequantize(every, None, torch.float32)
    assert found.isnan().equal(every.float().isnan())
    assert found.nan_to_num(0.0).equal(every.float().nan_to_num(0.0))
    assert found.isnan().sum() == 2


@pytest.mark.usefixtures("flushing")
def test_small_numbers_of_fp8_are_kept_where_float32_flushes_subnormal_ones() -> None:
    table = e4m3()
    found = dequantize(table.to(FP8), None, torch.float32)
    assert found.double().equal(table)


def test_int8_is_within_half_a_step_of_each_head() -> None:
    x = torch.randn(50, 3, 64) * torch.logspace(-6, 4, 50)[:, None, None]
    x[7] = 0
    numbers, scales = quantize(x, INT8)
    assert scales is not None
    assert scales.shape == (50, 3)
    step = x.double().abs().amax(-1, keepdim=True) / 127
    found = dequantize(numbers, scales, torch.float64)
    assert ((found - x.double()).abs() <= step * (0.5 + 1e-5)).all()
    assert (numbers.abs().amax(-1) == 127)[[*range(7), *range(8, 50)]].all()
    assert not numbers[7].any()
    broken = quantize(torch.tensor([1.0, math.nan]), INT8)
    assert dequantize(*broken, torch.float32).isnan().all()


def differing(ours: Tensor, theirs: Tensor) -> float:
    """The share of bytes that differ. Triton's interpreter (3.9) loses the carry when it
    rounds up to a power of two in FP8: there such numbers are left out.
    """
    differ = as_bytes(ours) != as_bytes(theirs)
    if DEVICE == "cpu" and ours.dtype is FP8:
        differ &= (as_bytes(theirs) & 7) != 0
    return differ.float().mean().item()


def in_8_bits(
    case: Case, dtype: torch.dtype
) -> tuple[Tensor, Tensor, CacheScales | None]:
    """A case's cache, and what its sequences then hold; the rest stays NaN."""
    caches, scales = [], []
    for cache in (case.k_cache, case.v_cache):
        numbers, of_cache = quantize(cache, dtype)
        caches.append(numbers)
        scales.append(of_cache)
    for kept in (case.keys, case.values):
        kept[:] = [dequantize(*quantize(one, dtype), torch.float64) for one in kept]
    keys, values = scales
    both = None if keys is None or values is None else CacheScales(keys, values)
    return caches[0], caches[1], both


@pytest.mark.parametrize(("dtype", "half"), KINDS, ids=str)
@pytest.mark.parametrize(("window", "splits"), [(0, 1), (0, 4), (20, 1)])
def test_decode_reads_8_bits(
    dtype: torch.dtype, half: torch.dtype, window: int, splits: int
) -> None:
    contexts = [1, 40, 77]
    case = make(contexts, dtype=half)
    keys, values, scales = in_8_bits(case, dtype)
    q = queries(3, 4, case)
    found = decode_attention(
        *(q, keys, values, case.table, case.rows, case.contexts, 0.3),
        window=window,
        scales=scales,
        splits=splits,
    )
    for i, context in enumerate(contexts):
        at = q[i : i + 1], case.keys[i], case.values[i], context - 1, 0.3, window
        assert (found[i].cpu() - written_out(*at)[0]).abs().max() < LIMIT[half]


@pytest.mark.parametrize(("dtype", "half"), KINDS, ids=str)
def test_chunks_and_drafts_read_8_bits(dtype: torch.dtype, half: torch.dtype) -> None:
    contexts, counts = [33, 60], [33, 11]
    case = make(contexts, dtype=half)
    keys, values, scales = in_8_bits(case, dtype)
    q = queries(44, 4, case)
    starts = torch.tensor([0, 49], device=DEVICE)
    sizes = torch.tensor(counts, device=DEVICE)
    offsets = torch.tensor([0, 33], device=DEVICE)
    found = prefill_attention(
        *(q, keys, values, case.table, case.rows, starts, sizes, offsets, 0.3),
        scales=scales,
        max_count=33,
    )
    first = slice(0, 1)
    of = case.rows[first], starts[first], sizes[first] - 8, offsets[first]
    drafted = prefill_attention(
        *(q, keys, values, case.table, *of, 0.3),
        scales=scales,
        max_count=33,
        draft_layout=DraftLayout(1, 1),
    )
    for i, (context, count, offset) in enumerate(
        zip(contexts, counts, (0, 33), strict=True)
    ):
        rows = slice(offset, offset + count)
        want = written_out(q[rows], case.keys[i], case.values[i], context - count, 0.3)
        assert (found[rows].cpu() - want).abs().max() < LIMIT[half]
        if not i:
            assert (drafted[: count - 8].cpu() - want[:-8]).abs().max() < LIMIT[half]


@pytest.mark.parametrize("dtype", [FP8, INT8], ids=str)
@pytest.mark.parametrize("tokens", [3, 520])
def test_keys_and_values_are_written_in_8_bits(
    dtype: torch.dtype, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel as by the reference, to the byte but for a rotation's last bit."""
    heads, kv_heads, dim, block = 4, 2, 32, 16
    blocks = -(-tokens // block) + 1
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device=DEVICE).to(HALF)
    qkv[0] = 0
    angles = torch.randn(99, dim, device=DEVICE)
    at = torch.randint(0, 99, (tokens,), device=DEVICE, dtype=torch.int32)
    slots = torch.randperm(blocks * block, device=DEVICE)[:tokens]
    slots[1] = -1
    norm = Norm(torch.rand(dim, device=DEVICE).to(HALF), 1e-6)
    found = []
    monkeypatch.setattr(rope, "rms_norm", plain.rms_norm)  # of the reference
    kernels: tuple[Any, ...] = (rope.rope_and_cache, rope._reference)
    for write in kernels:
        shape = 2, blocks, block, kv_heads, dim
        data = torch.zeros(shape, device=DEVICE, dtype=torch.uint8).view(dtype)
        kept = torch.zeros(shape[:-1], device=DEVICE)
        scales = CacheScales(*kept) if dtype is INT8 else None
        mine = qkv.clone()
        write(mine, angles, at, slots, *data, heads, kv_heads, norm, norm, scales)
        found.append((mine, data, kept))
    (ours, data, scale), (theirs, wanted, wanted_scale) = found
    torch.testing.assert_close(ours, theirs, atol=LIMIT[HALF], rtol=LIMIT[HALF])
    torch.testing.assert_close(scale, wanted_scale, atol=0, rtol=LIMIT[HALF])
    assert differing(data, wanted) < 0.02
    untouched = torch.ones(blocks * block, dtype=torch.bool, device=DEVICE)
    untouched[slots[slots >= 0]] = False
    assert not as_bytes(data).flatten(1, 2)[:, untouched].any()


def test_latents_in_fp8_are_written_and_read() -> None:
    latent, rotated, heads, block = 64, 16, 4, 16
    kv = torch.randn(40, latent + rotated, device=DEVICE).to(HALF)
    norm = Norm(torch.rand(latent, device=DEVICE).to(HALF) + 0.5, 1e-6)
    angles = torch.randn(99, rotated, device=DEVICE)
    at = torch.arange(40, device=DEVICE, dtype=torch.int32)
    q = torch.randn(40, heads, latent + rotated, device=DEVICE).to(HALF)
    caches = []
    for kernel in (True, False):
        shape = 3, block, latent + rotated
        cache = torch.zeros(shape, device=DEVICE, dtype=torch.uint8).view(FP8)
        turned = q[..., latent:].clone()
        if kernel:
            write_latent(
                *(kv, norm, angles, at, at.long(), cache, turned), interleaved=False
            )
        else:
            _write_reference(
                *(kv, norm, angles, at, at.long(), cache, turned, turned, False)
            )
        caches.append(cache)
    ours, theirs = caches
    assert differing(ours, theirs) < 0.01
    table = torch.tensor([[0, 1, 2]], device=DEVICE, dtype=torch.int32)
    one = torch.zeros(1, device=DEVICE, dtype=torch.int32)
    found = latent_decode(
        *(q[39:], ours, table, one, one + 40, 0.1), value_dim=latent, splits=2
    )
    keys = ours.double().flatten(0, 1)[:40, None].cpu()
    want = written_out(q[39:], keys, keys, 39, 0.1)[..., :latent]
    assert (found.cpu() - want).abs().max() < LIMIT[HALF]


def test_scales_belong_to_int8_alone() -> None:
    case = make([5], dtype=HALF)
    keys, values, scales = in_8_bits(case, INT8)
    q = queries(1, 4, case)
    of = case.table, case.rows, case.contexts, 0.3
    with pytest.raises(ValueError, match="INT8 has scales"):
        decode_attention(q, keys, values, *of)
    with pytest.raises(ValueError, match="INT8 has scales"):
        decode_attention(q, case.k_cache, case.v_cache, *of, scales=scales)

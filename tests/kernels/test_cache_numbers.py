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
    values = dequantize(numbers, None, torch.float64)
    wide = x.double().abs().clamp(max=448)
    best = (wide[:, None] - table).abs().min(1).values
    assert torch.equal((values.abs() - wide).abs(), best)
    assert torch.equal(values.sign(), x.double().sign() * (values != 0))
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
    all_numbers = torch.arange(256, dtype=torch.uint8).view(FP8)
    values = dequantize(all_numbers, None, torch.float32)
    assert values.isnan().equal(all_numbers.float().isnan())
    assert values.nan_to_num(0.0).equal(all_numbers.float().nan_to_num(0.0))
    assert values.isnan().sum() == 2


@pytest.mark.usefixtures("flushing")
def test_small_numbers_of_fp8_are_kept_where_float32_flushes_subnormal_ones() -> None:
    table = e4m3()
    values = dequantize(table.to(FP8), None, torch.float32)
    assert values.double().equal(table)


def test_int8_is_within_half_a_step_of_each_head() -> None:
    x = torch.randn(50, 3, 64) * torch.logspace(-6, 4, 50)[:, None, None]
    x[7] = 0
    numbers, scales = quantize(x, INT8)
    assert scales is not None
    assert scales.shape == (50, 3)
    step = x.double().abs().amax(-1, keepdim=True) / 127
    values = dequantize(numbers, scales, torch.float64)
    assert ((values - x.double()).abs() <= step * (0.5 + 1e-5)).all()
    assert (numbers.abs().amax(-1) == 127)[[*range(7), *range(8, 50)]].all()
    assert not numbers[7].any()
    broken = quantize(torch.tensor([1.0, math.nan]), INT8)
    assert dequantize(*broken, torch.float32).isnan().all()


def differing(numbers: Tensor, reference: Tensor) -> float:
    """The share of bytes that differ. Triton's interpreter (3.9) loses the carry when it
    rounds up to a power of two in FP8: there such numbers are left out.
    """
    differ = as_bytes(numbers) != as_bytes(reference)
    if DEVICE == "cpu" and numbers.dtype is FP8:
        differ &= (as_bytes(reference) & 7) != 0
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
    for contexts in (case.keys, case.values):
        contexts[:] = [
            dequantize(*quantize(context, dtype), torch.float64) for context in contexts
        ]
    keys, values = scales
    both_scales = None if keys is None or values is None else CacheScales(keys, values)
    return caches[0], caches[1], both_scales


@pytest.mark.parametrize(("dtype", "half"), KINDS, ids=str)
@pytest.mark.parametrize(("window", "splits"), [(0, 1), (0, 4), (20, 1)])
def test_decode_reads_8_bits(
    dtype: torch.dtype, half: torch.dtype, window: int, splits: int
) -> None:
    contexts = [1, 40, 77]
    case = make(contexts, dtype=half)
    keys, values, scales = in_8_bits(case, dtype)
    q = queries(3, 4, case)
    out = decode_attention(
        *(q, keys, values, case.table, case.rows, case.contexts, 0.3),
        window=window,
        scales=scales,
        splits=splits,
    )
    for i, context in enumerate(contexts):
        arguments = q[i : i + 1], case.keys[i], case.values[i], context - 1, 0.3, window
        assert (out[i].cpu() - written_out(*arguments)[0]).abs().max() < LIMIT[half]


@pytest.mark.parametrize(("dtype", "half"), KINDS, ids=str)
def test_chunks_and_drafts_read_8_bits(dtype: torch.dtype, half: torch.dtype) -> None:
    contexts, counts = [33, 60], [33, 11]
    case = make(contexts, dtype=half)
    keys, values, scales = in_8_bits(case, dtype)
    q = queries(44, 4, case)
    starts = torch.tensor([0, 49], device=DEVICE)
    sizes = torch.tensor(counts, device=DEVICE)
    offsets = torch.tensor([0, 33], device=DEVICE)
    out = prefill_attention(
        *(q, keys, values, case.table, case.rows, starts, sizes, offsets, 0.3),
        scales=scales,
        max_count=33,
    )
    first = slice(0, 1)
    chunk = case.rows[first], starts[first], sizes[first] - 8, offsets[first]
    drafted = prefill_attention(
        *(q, keys, values, case.table, *chunk, 0.3),
        scales=scales,
        max_count=33,
        draft_layout=DraftLayout(1, 1),
    )
    for i, (context, count, offset) in enumerate(
        zip(contexts, counts, (0, 33), strict=True)
    ):
        rows = slice(offset, offset + count)
        want = written_out(q[rows], case.keys[i], case.values[i], context - count, 0.3)
        assert (out[rows].cpu() - want).abs().max() < LIMIT[half]
        if not i:
            assert (drafted[: count - 8].cpu() - want[:-8]).abs().max() < LIMIT[half]


@pytest.mark.parametrize("dtype", [FP8, INT8], ids=str)
@pytest.mark.parametrize(("tokens", "norms_last"), [(3, False), (520, False), (3, True)])
def test_keys_and_values_are_written_in_8_bits(
    dtype: torch.dtype, tokens: int, norms_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel as by the reference, to the byte but for a rotation's last bit."""
    heads, kv_heads, dim, block = 4, 2, 32, 16
    blocks = -(-tokens // block) + 1
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device=DEVICE).to(HALF)
    qkv[0] = 0
    angles = torch.randn(99, dim, device=DEVICE)
    positions = torch.randint(0, 99, (tokens,), device=DEVICE, dtype=torch.int32)
    slots = torch.randperm(blocks * block, device=DEVICE)[:tokens]
    slots[1] = -1
    norm = Norm(torch.rand(dim, device=DEVICE).to(HALF), 1e-6)
    results = []
    monkeypatch.setattr(rope, "normalise", plain.normalise)  # of the reference
    kernels: tuple[Any, ...] = (rope.rope_and_cache, rope._reference)
    for write in kernels:
        shape = 2, blocks, block, kv_heads, dim
        data = torch.zeros(shape, device=DEVICE, dtype=torch.uint8).view(dtype)
        scale_pair = torch.zeros(shape[:-1], device=DEVICE)
        scales = CacheScales(*scale_pair) if dtype is INT8 else None
        qkv_copy = qkv.clone()
        write(
            *(qkv_copy, angles, positions, slots, *data, heads, kv_heads, norm, norm),
            scales,
            norms_last=norms_last,
        )
        results.append((qkv_copy, data, scale_pair))
    (rotated, data, scale), (expected, expected_data, expected_scale) = results
    torch.testing.assert_close(rotated, expected, atol=LIMIT[HALF], rtol=LIMIT[HALF])
    torch.testing.assert_close(scale, expected_scale, atol=0, rtol=LIMIT[HALF])
    assert differing(data, expected_data) < 0.02
    untouched = torch.ones(blocks * block, dtype=torch.bool, device=DEVICE)
    untouched[slots[slots >= 0]] = False
    assert not as_bytes(data).flatten(1, 2)[:, untouched].any()


def test_latents_in_fp8_are_written_and_read() -> None:
    latent, rotated, heads, block = 64, 16, 4, 16
    kv = torch.randn(40, latent + rotated, device=DEVICE).to(HALF)
    norm = Norm(torch.rand(latent, device=DEVICE).to(HALF) + 0.5, 1e-6)
    angles = torch.randn(99, rotated, device=DEVICE)
    positions = torch.arange(40, device=DEVICE, dtype=torch.int32)
    q = torch.randn(40, heads, latent + rotated, device=DEVICE).to(HALF)
    caches = []
    for kernel in (True, False):
        shape = 3, block, latent + rotated
        cache = torch.zeros(shape, device=DEVICE, dtype=torch.uint8).view(FP8)
        turned = q[..., latent:].clone()
        if kernel:
            write_latent(
                *(kv, norm, angles, positions, positions.long(), cache, turned),
                interleaved=False,
            )
        else:
            _write_reference(
                *(
                    kv,
                    norm,
                    angles,
                    positions,
                    positions.long(),
                    cache,
                    turned,
                    turned,
                    False,
                )
            )
        caches.append(cache)
    written, reference = caches
    assert differing(written, reference) < 0.01
    table = torch.tensor([[0, 1, 2]], device=DEVICE, dtype=torch.int32)
    zero = torch.zeros(1, device=DEVICE, dtype=torch.int32)
    out = latent_decode(
        *(q[39:], written, table, zero, zero + 40, 0.1), value_dim=latent, splits=2
    )
    keys = written.double().flatten(0, 1)[:40, None].cpu()
    want = written_out(q[39:], keys, keys, 39, 0.1)[..., :latent]
    assert (out.cpu() - want).abs().max() < LIMIT[HALF]


def test_scales_belong_to_int8_alone() -> None:
    case = make([5], dtype=HALF)
    keys, values, scales = in_8_bits(case, INT8)
    q = queries(1, 4, case)
    arguments = case.table, case.rows, case.contexts, 0.3
    with pytest.raises(ValueError, match="INT8 has scales"):
        decode_attention(q, keys, values, *arguments)
    with pytest.raises(ValueError, match="INT8 has scales"):
        decode_attention(q, case.k_cache, case.v_cache, *arguments, scales=scales)

"""Norm, rotation with KV write, activation and log-probabilities against float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minfer.kernels import norm, plain, rope
from minfer.kernels.activation import gated_mul
from minfer.kernels.leaves import UNGATED, Activation, Norm
from minfer.kernels.norm import normalise
from minfer.kernels.rope import rope_and_cache
from tests.circles import claimed, long

from .conftest import CUDA

# Under the interpreter, rounding to bfloat16 truncates.
TYPES = [torch.float32, torch.float16, *([torch.bfloat16] if CUDA else [])]
LIMIT = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# Infinities are meant: numpy, which is the interpreter, warns of them.
pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:(overflow|divide by zero) encountered"),
    pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation"),
]
types = pytest.mark.parametrize("dtype", TYPES, ids=str)


def randn(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw).to(device, dtype)


def error(out: Tensor, expected: Tensor) -> float:
    assert out.isfinite().all()
    return float((out.double() - expected).norm() / expected.norm())


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@types
@pytest.mark.parametrize(
    ("rows", "size"), [(1, 64), (3, 896), (5, 100), (2, 1), (9, 1536)]
)
def test_rms_norm(device: str, dtype: torch.dtype, rows: int, size: int) -> None:
    x, weight = (randn(n, size, dtype=dtype, device=device, seed=n) for n in (rows, 77))
    before = x.clone()
    out = normalise(x, Norm(weight[0], 1e-5))
    assert out.dtype is dtype
    assert error(out, normed(x.double(), weight[0], 1e-5)) < 2 * LIMIT[dtype]
    assert torch.equal(x, before)


@types
@pytest.mark.parametrize("min_rows", [1, 1000])
def test_rms_norm_of_the_sum(
    device: str, dtype: torch.dtype, min_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        norm, "MIN_SHARED_PROGRAM_ROWS", min_rows
    )  # 1: several rows of a program, the last one partly
    monkeypatch.setattr(norm, "TILE_ELEMENTS", 512)
    wide = randn(7, 200, dtype=dtype, device=device)
    x, residual = wide[:, :120], randn(7, 120, dtype=dtype, device=device, seed=1)
    weight = randn(120, dtype=dtype, device=device, seed=2)
    total, out = residual + x, torch.full((7, 120), math.nan, dtype=dtype, device=device)
    assert normalise(x, Norm(weight, 1e-6), residual, out) is out
    assert torch.equal(residual, total), "the sum is rounded once"
    assert error(out, normed(total.double(), weight, 1e-6)) < 2 * LIMIT[dtype]


def test_rms_norm_in_place(device: str) -> None:
    x = randn(4, 96, dtype=torch.float32, device=device)
    weight = randn(96, dtype=torch.float32, device=device, seed=1)
    expected = normalise(x, Norm(weight, 1e-6))
    assert normalise(x, Norm(weight, 1e-6), out=x) is x
    assert torch.equal(x, expected)


@pytest.mark.parametrize("dtype", TYPES[1:], ids=str)
def test_rms_norm_rounds_where_transformers_does(device: str, dtype: torch.dtype) -> None:
    x, weight = (randn(n, 256, dtype=dtype, device=device, seed=n) for n in (6, 1))
    wide = x.float()
    rounded = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype)
    same = normalise(x, Norm(weight[0], 1e-6)) == rounded * weight[0]
    assert same.float().mean() > 0.99  # the root may differ in its last bit


def layer_normed(x: Tensor, norm: Norm) -> Tensor:
    """LayerNorm in float64, with factors for each head if there are such."""
    wide = F.layer_norm(x.double(), x.shape[-1:], eps=norm.eps) * norm.weight.double()
    return wide if norm.bias is None else wide + norm.bias.double()


@types
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "size", "min_rows"), [(1, 64, 9), (3, 896, 9), (7, 100, 1)]
)
def test_layer_norm(
    device: str,
    dtype: torch.dtype,
    rows: int,
    size: int,
    min_rows: int,
    has_bias: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(norm, "MIN_SHARED_PROGRAM_ROWS", min_rows)
    x = 3 + randn(rows, size, dtype=dtype, device=device)  # a mean that matters
    weight, bias = (randn(size, dtype=dtype, device=device, seed=s) for s in (1, 2))
    layer_norm = Norm(weight, 1e-2, bias if has_bias else None, centered=True)
    expected = layer_normed(x, layer_norm)
    assert error(normalise(x, layer_norm), expected) < 2 * LIMIT[dtype]
    assert error(plain.normalise(x, layer_norm), expected) < 2 * LIMIT[dtype]
    residual, other = x.clone(), randn(rows, size, dtype=dtype, device=device, seed=5)
    summed = normalise(other, layer_norm, residual)
    assert error(summed, layer_normed(residual, layer_norm)) < 2 * LIMIT[dtype]
    assert torch.equal(residual, x + other)
    assert normalise(x, layer_norm, out=x) is x
    assert error(x, expected) < 2 * LIMIT[dtype]


@types
@pytest.mark.parametrize("size", [1, 100, 2500])
def test_gated_mul(device: str, dtype: torch.dtype, size: int) -> None:
    x = 4 * randn(3, 2 * size, dtype=dtype, device=device)
    gate, up = x.double().chunk(2, -1)
    out = gated_mul(x)
    assert out.shape == (3, size)
    assert error(out, gate * gate.sigmoid() * up) < 2 * LIMIT[dtype]
    buffer = torch.full_like(out, math.nan)
    assert gated_mul(x, out=buffer) is buffer
    assert torch.equal(buffer, out)


def test_silu_of_large_values(device: str) -> None:
    x = torch.tensor([[-1e4, -200.0, 200.0, 1e4, 1.0, 1.0, 1.0, 1.0]], device=device)
    assert gated_mul(x).tolist() == [[0.0, 0.0, 200.0, 1e4]]


class Rope:
    """A step's tensors, and what must come of them in float64."""

    def __init__(
        self,
        device: str,
        dtype: torch.dtype,
        heads: int,
        kv_heads: int,
        dim: int,
        *,
        apart: bool = False,
    ):
        """`apart`: a block is not beside the next of its layer."""
        self.heads, self.kv_heads, self.dim, tokens = heads, kv_heads, dim, 5
        pool = torch.full((2, 2, 4, 6, kv_heads, dim), 7.0, dtype=dtype, device=device)
        if apart:
            pool = pool.movedim(2, 0).contiguous().movedim(0, 2)
        self.pool, self.k_cache, self.v_cache = pool, *pool[1]
        # A view into a wider tensor is a row stride that is not the row's length.
        width = (heads + 2 * kv_heads) * dim
        self.qkv = randn(tokens, width + 16, dtype=dtype, device=device)[:, :width]
        self.positions = torch.tensor([0, 3, 11, 2, 5], device=device)
        self.slots = torch.tensor([23, 0, 7, -1, 8], device=device)
        angles = torch.outer(torch.arange(12.0), 0.3 ** torch.arange(dim // 2))
        self.table = 1.1 * torch.cat((angles.cos(), angles.sin()), -1).to(device)
        factors = (randn(dim, dtype=dtype, device=device, seed=s) for s in (1, 2))
        self.norms = [Norm(factor, 1e-5) for factor in factors]

    def run(
        self,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
        norms_last: bool = False,
        query_scales: Tensor | None = None,
    ) -> None:
        rope_and_cache(
            self.qkv,
            self.table,
            self.positions,
            self.slots,
            self.k_cache,
            self.v_cache,
            self.heads,
            self.kv_heads,
            q_norm,
            k_norm,
            norms_last=norms_last,
            query_scales=query_scales,
        )

    def expected(
        self, heads: Tensor, norm: Norm | None, norms_last: bool = False
    ) -> Tensor:
        def norm_heads(x: Tensor) -> Tensor:
            if norm is None:
                return x
            is_centered = norm.centered
            return layer_normed(x, norm) if is_centered else normed(x, norm.weight, 1e-5)

        x = heads.double()
        first, second = (x if norms_last else norm_heads(x)).chunk(2, -1)
        cos, sin = self.table[self.positions, None].double().chunk(2, -1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        return norm_heads(turned) if norms_last else turned


@types
@pytest.mark.parametrize("shared", [1, 2])  # tokens of a program
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [
        (8, 2, 64),
        (6, 2, 80),
        (3, 3, 256),
        *claimed([(8, 4, 64), (3, 1, 96), (4, 4, 128)]),
    ],
)
def test_rope_and_cache(
    device: str,
    dtype: torch.dtype,
    qk_norm: bool,
    heads: int,
    kv_heads: int,
    dim: int,
    shared: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rope, "TOKENS_PER_PROGRAM", shared)
    monkeypatch.setattr(rope, "MIN_SHARED_PROGRAM_TOKENS", 5)
    step = Rope(device, dtype, heads, kv_heads, dim, apart=shared > 1)
    before = step.qkv.reshape(5, -1, dim).clone()
    query, key, value = torch.split(before, [heads, kv_heads, kv_heads], 1)
    q_norm, k_norm = step.norms if qk_norm else (None, None)
    step.run(q_norm, k_norm)
    after = step.qkv.reshape(5, -1, dim)
    assert error(after[:, :heads], step.expected(query, q_norm)) < 2 * LIMIT[dtype]
    assert torch.equal(after[:, heads:], before[:, heads:])
    keys, values = step.k_cache.flatten(0, 1), step.v_cache.flatten(0, 1)
    is_stored = step.slots >= 0
    slots = step.slots[is_stored]
    assert error(keys[slots], step.expected(key, k_norm)[is_stored]) < 2 * LIMIT[dtype]
    assert torch.equal(values[slots], value[is_stored])
    is_other = torch.ones(len(keys), dtype=torch.bool, device=device)
    is_other[slots] = False
    assert (step.pool[0] == 7).all()
    assert (keys[is_other] == 7).all()
    assert (values[is_other] == 7).all()


@pytest.mark.parametrize("shared", [1, 4])
def test_keys_and_values_are_written_alike_without_queries(
    device: str, shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rope, "TOKENS_PER_PROGRAM", shared)
    monkeypatch.setattr(rope, "MIN_SHARED_PROGRAM_TOKENS", 5)
    step, alone = (Rope(device, torch.float32, 4, 2, 64) for _ in range(2))
    q_norm, k_norm = step.norms
    step.run(q_norm, k_norm)
    alone.qkv, alone.heads = alone.qkv[:, 4 * 64 :], 0
    alone.run(k_norm, k_norm)
    assert torch.equal(alone.pool, step.pool)


@types
def test_heads_are_normalised_after_the_rotation(device: str, dtype: torch.dtype) -> None:
    step = Rope(device, dtype, 4, 2, 64)
    query, key, _ = step.qkv.reshape(5, -1, 64).clone().split_with_sizes([4, 2, 2], 1)
    q_norm, k_norm = step.norms
    step.run(q_norm, k_norm, norms_last=True)
    queries = step.qkv.reshape(5, -1, 64)[:, :4]
    expected = step.expected(query, q_norm, norms_last=True)
    assert error(queries, expected) < 2 * LIMIT[dtype]
    is_stored = step.slots >= 0
    keys = step.k_cache.flatten(0, 1)[step.slots[is_stored]]
    expected = step.expected(key, k_norm, norms_last=True)[is_stored]
    assert error(keys, expected) < 2 * LIMIT[dtype]


@types
@pytest.mark.parametrize("shared", [1, 2])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(8, 4, 64), *claimed([(3, 1, 80), (6, 2, 64)])]
)
def test_heads_with_layer_norms_of_their_own(
    device: str,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    shared: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rope, "TOKENS_PER_PROGRAM", shared)
    monkeypatch.setattr(rope, "MIN_SHARED_PROGRAM_TOKENS", 5)
    step, other = (Rope(device, dtype, heads, kv_heads, dim) for _ in range(2))
    step.qkv += 1  # a mean that matters
    other.qkv += 1
    q_norm, k_norm = (
        Norm(randn(n, dim, dtype=dtype, device=device, seed=n), 1e-2, centered=True)
        for n in (heads, kv_heads)
    )
    before = step.qkv.reshape(5, -1, dim).clone()
    query, key, value = torch.split(before, [heads, kv_heads, kv_heads], 1)
    step.run(q_norm, k_norm)
    after = step.qkv.reshape(5, -1, dim)
    assert error(after[:, :heads], step.expected(query, q_norm)) < 2 * LIMIT[dtype]
    is_stored = step.slots >= 0
    keys, values = step.k_cache.flatten(0, 1), step.v_cache.flatten(0, 1)
    slots, expected = step.slots[is_stored], step.expected(key, k_norm)[is_stored]
    assert error(keys[slots], expected) < 2 * LIMIT[dtype]
    assert torch.equal(values[slots], value[is_stored])
    with monkeypatch.context() as patched:  # the reference
        patched.setattr(rope, "on_triton", lambda _: False)
        patched.setattr(rope, "normalise", plain.normalise)
        other.run(q_norm, k_norm)
    assert error(other.k_cache, step.k_cache.double()) < 2 * LIMIT[dtype]


@types
@pytest.mark.parametrize("shared", [1, 2])
@pytest.mark.parametrize("heads", [3, 8])
def test_rope_scales_queries_by_position(
    device: str,
    dtype: torch.dtype,
    heads: int,
    shared: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rope, "TOKENS_PER_PROGRAM", shared)
    monkeypatch.setattr(rope, "MIN_SHARED_PROGRAM_TOKENS", 5)
    plain, scaled = (Rope(device, dtype, heads, 1, 64) for _ in range(2))
    query = scaled.qkv.reshape(5, -1, 64)[:, :heads].clone()
    factors = torch.linspace(1, 3, 12, device=device)
    plain.run()
    scaled.run(query_scales=factors)
    of_tokens = factors[scaled.positions].double()[:, None, None]
    expected = scaled.expected(query, None) * of_tokens
    after = scaled.qkv.reshape(5, -1, 64)
    assert error(after[:, :heads], expected) < 6 * LIMIT[dtype]
    assert torch.equal(after[:, heads:], plain.qkv.reshape(5, -1, 64)[:, heads:])
    assert torch.equal(scaled.pool, plain.pool)


@pytest.mark.long
def test_rope_takes_narrow_indices(device: str) -> None:
    wide, narrow = (Rope(device, torch.float32, 2, 1, 64) for _ in range(2))
    narrow.positions, narrow.slots = narrow.positions.int(), narrow.slots.int()
    for step in (wide, narrow):
        step.run()
    assert torch.equal(wide.qkv, narrow.qkv)
    assert torch.equal(wide.pool, narrow.pool)


@pytest.mark.skipif(not CUDA, reason="memory beyond 2**31 elements is for the GPU")
def test_rope_writes_far_slots() -> None:
    cache = torch.zeros(2, 600_000, 16, 4, 64, dtype=torch.float16, device="cuda")
    step = Rope("cuda", torch.float16, 4, 4, 64)
    step.slots[:] = 16 * 600_000 - 1
    step.qkv[1:] = step.qkv[0]
    step.k_cache, step.v_cache = cache
    step.run()
    assert torch.equal(cache[1, -1, -1], step.qkv[0, -256:].view(4, 64))
    assert not cache[0].flatten(0, 1)[:-1].any()


@types
@pytest.mark.parametrize("activation", ["gelu_tanh", "clamped"])
def test_other_gated_activations(
    device: str, dtype: torch.dtype, activation: Activation
) -> None:
    x = 6 * randn(3, 200, dtype=dtype, device=device)
    expected = plain.gated_mul(x.double().cpu(), activation)
    out = gated_mul(x, activation)
    assert error(out.cpu(), expected) < 2 * LIMIT[dtype]
    broken = torch.full_like(x, math.nan)
    assert gated_mul(broken, activation).isnan().all()


@types
@pytest.mark.parametrize("activation", sorted(UNGATED))
def test_activations_without_a_gate(
    device: str, dtype: torch.dtype, activation: Activation
) -> None:
    x = 3 * randn(3, 200, dtype=dtype, device=device)
    wide = x.double()
    if activation == "ungated_relu2":
        expected = F.relu(wide).square()
    else:
        approximate = "tanh" if activation.endswith("tanh") else "none"
        expected = F.gelu(wide, approximate=approximate)
    out = gated_mul(x, activation)
    assert out.shape == x.shape
    assert error(out, expected) < 2 * LIMIT[dtype]
    assert error(plain.gated_mul(x, activation), expected) < 2 * LIMIT[dtype]
    broken = torch.full_like(x, math.nan)
    assert gated_mul(broken, activation).isnan().all()


@types
@pytest.mark.parametrize("keys_are_values", [False, True])
@pytest.mark.parametrize("shared", [1, *long([2])])  # tokens of a program
def test_values_are_normalised_and_may_be_keys(
    device: str,
    dtype: torch.dtype,
    keys_are_values: bool,
    shared: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rope, "MIN_SHARED_PROGRAM_TOKENS", 1 if shared > 1 else 1 << 30)
    monkeypatch.setattr(rope, "TOKENS_PER_PROGRAM", shared)
    step = Rope(device, dtype, 4, 2, 64)
    q_norm, k_norm = (Norm(norm.weight.float(), 1e-5) for norm in step.norms)
    ones = Norm(torch.ones(64, device=device), 1e-5)
    heads = step.qkv.clone().reshape(5, 8, 64)
    query, key = step.expected(heads[:, :4], q_norm), step.expected(heads[:, 4:6], k_norm)
    values = heads[:, 4:6] if keys_are_values else heads[:, 6:]
    value = normed(values.double(), ones.weight, 1e-5)
    if keys_are_values:
        step.qkv = step.qkv[:, : 6 * 64]
    rope_and_cache(
        step.qkv,
        step.table,
        step.positions,
        step.slots,
        step.k_cache,
        step.v_cache,
        4,
        2,
        q_norm,
        k_norm,
        v_norm=ones,
        keys_are_values=keys_are_values,
    )
    out = step.qkv.reshape(5, -1, 64)[:, :4]
    assert error(out, query) < 2 * LIMIT[dtype]
    written = step.slots >= 0
    for cache, want in ((step.k_cache, key), (step.v_cache, value)):
        new = cache.flatten(0, 1)[step.slots[written]]
        assert error(new, want[written]) < 2 * LIMIT[dtype]


@types
def test_queries_alone_are_rotated_for_keys_of_another_layer(
    device: str, dtype: torch.dtype
) -> None:
    step = Rope(device, dtype, 4, 2, 64)
    step.qkv = step.qkv[:, : 4 * 64]
    query = step.expected(step.qkv.clone().reshape(5, 4, 64), None)
    before = step.pool.clone()
    arguments = step.qkv, step.table, step.positions, step.slots
    rope_and_cache(*arguments, step.k_cache, step.v_cache, 4, 0)
    assert torch.equal(step.pool, before)
    assert error(step.qkv.reshape(5, 4, 64), query) < 2 * LIMIT[dtype]

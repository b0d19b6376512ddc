"""Products with quantized matrices against float64, of each scheme.

Bounds. Products of few tokens do not round activations: what differs from float64 are
sums in float32 (1e-5 of the result's norm), and outputs, and with several groups in a
pass scaled weights, in the activations' dtype (`LIMIT`).
"""

from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minfer.kernels import plain, quantized
from minfer.kernels import quantized_linear as module
from minfer.kernels.fused_linear import launch
from minfer.kernels.leaves import (
    FP8,
    FP8_BLOCKS,
    INT8,
    MXFP4,
    NVFP4,
    Activation,
    Linear,
    Norm,
    Scheme,
    int4,
)
from minfer.kernels.linear_tunes import LinearTune
from minfer.kernels.quantized_kernels import dequantized, round_rows, scaled_sums
from minfer.kernels.quantized_tunes import TABLE, rounded_tune_of, tune_of
from tests.circles import long

from .conftest import CUDA

DEVICE = "cuda" if CUDA else "cpu"
LIMIT = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# Under the interpreter, products of bfloat16 are wrong.
TYPES = [torch.float32, torch.float16, *([torch.bfloat16] if CUDA else [])]
EPS = 1e-5
CLAMPED: Activation = "clamped"
SILU: Activation = "silu"
UNGATED: Activation = "ungated_gelu"
ZEROS = int4(32, zeros=True)
SCHEMES = {
    "fp8": FP8,
    "blocks": FP8_BLOCKS,
    "int8": INT8,
    "int4": int4(64),
    "zeros": ZEROS,
    "mxfp4": MXFP4,
    "nvfp4": NVFP4,
}
schemes = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=[*SCHEMES])
# rows, columns, depth, splits, warps, stages
ONE = LinearTune(1, 16, 64, 1, 2, 1)
ONE_SPLIT = LinearTune(1, 16, 128, 2, 2, 2)
MANY_TOKENS = LinearTune(16, 16, 64, 1, 4, 2)
SPLIT = LinearTune(16, 32, 128, 2, 4, 2)
SWAPPED = LinearTune(16, 16, 32, 1, 4, 2, swapped=True)
DEQUANTIZED = LinearTune(16, 16, 64, 1, 4, 2, swapped=True, dequantized=True)
# Of which a pass has one group and several, and what is added is loaded late.
LARGE = [
    LinearTune(128, 16, 32, 2, 4, 2, swapped=True, dequantized=True),
    LinearTune(128, 32, 128, 1, 4, 2, dequantized=True),
]
TUNES = [ONE, SPLIT, *long(zip([ONE_SPLIT, MANY_TOKENS, SWAPPED, DEQUANTIZED]))]

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:overflow encountered"),
    pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation"),
]
Name = Literal["norm_linear", "linear", "linear_add", "norm_gated"]


def leaf(matrix: Tensor, scheme: Scheme, bias: Tensor | None = None) -> Linear:
    form = quantized.quantize(matrix, scheme, matrix.dtype)
    parts = (len(form.weight),)
    return Linear(**form._asdict(), bias=bias, scheme=scheme, parts=parts)


class Case:
    """Tensors of a product."""

    def __init__(
        self,
        scheme: Scheme,
        tokens: int,
        ins: int,
        outs: int,
        dtype: torch.dtype = torch.float32,
        bias: bool = True,
    ) -> None:
        draw = torch.Generator(DEVICE).manual_seed(tokens * ins + outs)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw, device=DEVICE).to(dtype)

        self.x, self.norm = randn(tokens, ins), Norm(randn(ins), EPS)
        self.by = leaf(randn(outs, ins) / ins**0.5, scheme, randn(outs) if bias else None)
        self.residual = randn(tokens, outs)
        if CUDA:  # weights are there before the kernel before a product is launched
            torch.cuda.synchronize()

    def expected(self, name: Name, activation: Activation = "silu") -> Tensor:
        x = self.x.double()
        if name.startswith("norm"):
            x = F.rms_norm(x, (x.shape[1],), self.norm.weight.double(), EPS)
        bias = None if self.by.bias is None else self.by.bias.double()
        out = F.linear(x, quantized.dequantize(self.by).double(), bias)
        if name == "linear_add":
            return self.residual.double() + out
        return plain.gated_mul(out, activation) if name == "norm_gated" else out

    def made(
        self, name: Name, tune: LinearTune | None, activation: Activation = "silu"
    ) -> Tensor:
        if name == "norm_linear":
            return module.norm_linear(self.x, self.norm, self.by, tune)
        if name == "linear":
            return module.linear(self.x, self.by, tune)
        if name == "norm_gated":
            return module.norm_gated(
                self.x, self.norm, self.by, activation, fused=True, tune=tune
            )
        out = self.residual.clone()
        module.linear_add(out, self.x, self.by, tune)
        return out

    def check(self, name: Name, tune: LinearTune | None) -> None:
        error = relative(self.made(name, tune), self.expected(name))
        assert error < LIMIT[self.x.dtype], f"{name}: relative error {error:.2e}"


def relative(out: Tensor, expected: Tensor) -> float:
    assert out.shape == expected.shape
    error = (out.double() - expected).norm() / expected.norm().clamp(min=1e-9)
    return float(error)


@schemes
@pytest.mark.parametrize("tune", TUNES, ids=str)
def test_few_tokens(scheme: Scheme, tune: LinearTune) -> None:
    tokens = 1 if tune.rows == 1 else 3
    Case(scheme, tokens, 192, 32).check("norm_linear", tune)


@pytest.mark.long
@schemes
@pytest.mark.parametrize("dtype", TYPES[1:], ids=str)
@pytest.mark.parametrize("tune", [ONE, SPLIT], ids=str)
def test_every_function(scheme: Scheme, tune: LinearTune, dtype: torch.dtype) -> None:
    bias = tune.splits > 1
    case = Case(scheme, 2, 192, 48, dtype, bias)
    case.check("linear", tune)
    case.check("linear_add", tune)
    Case(scheme, 2, 192, 32, dtype, bias).check("norm_gated", tune)


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["blocks", "int4", "zeros", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("tune", LARGE, ids=str)
def test_large_tiles(scheme: str, tune: LinearTune) -> None:
    case = Case(SCHEMES[scheme], 130, 192, 32)
    case.check("linear_add", tune)
    case.check("norm_gated", tune)


@pytest.mark.long
@schemes
def test_inputs_that_no_tile_divides(scheme: Scheme) -> None:
    """Blocks of 128 may be cut; other groups divide the inputs."""
    ins = 144 if scheme.group in (0, 128) else 192
    Case(scheme, 1, ins, 16).check("linear", LinearTune(1, 16, 256, 1, 2, 1))
    Case(scheme, 2, ins, 32).check("linear", LinearTune(16, 32, 128, 2, 4, 2))


@schemes
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_dequantized(scheme: Scheme, dtype: torch.dtype) -> None:
    case = Case(scheme, 1, 192, 40, dtype)
    matrix = dequantized(case.by, case.x)
    assert torch.equal(matrix, quantized.dequantize(case.by).to(dtype))


@pytest.mark.parametrize("scheme", [FP8, INT8], ids=["fp8", "int8"])
@pytest.mark.parametrize("size", [100, *long([5000, 30000])])  # 1, 3 and 8 tiles
@pytest.mark.parametrize("before", ["", "norm", "silu", UNGATED, *long(["clamped"])])
def test_rounded_rows(scheme: Scheme, size: int, before: str) -> None:
    case = Case(scheme, 3, size, 8)
    case.x[1] = 0
    x, norm, activation = case.x, None, None
    if before == "norm":
        norm = case.norm
        unrounded = plain.normalise(x, norm)
    elif before:
        activation = next(a for a in (CLAMPED, UNGATED, SILU) if a == before)
        if activation != UNGATED:
            x = torch.cat([x, x.flip(0, 1) + 1], 1)
        unrounded = plain.gated_mul(x, activation)
    else:
        unrounded = x
    numbers, scales = round_rows(x, case.by.weight.dtype, norm, activation)
    rounded = quantized.round_activations(unrounded, scheme)
    assert rounded is not None
    torch.testing.assert_close(scales, rounded[1], rtol=1e-6, atol=0)
    values, expected = numbers.float() * scales, rounded[0].float() * rounded[1]
    if before:  # another rounding before moves a number to its neighbour at times
        assert relative(values, expected.double()) < 5e-3
    else:
        assert torch.equal(numbers.float(), rounded[0].float())


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tune", [MANY_TOKENS, *long(zip([SPLIT, SWAPPED]))], ids=str)
def test_products_of_rows_in_fp8(tune: LinearTune, gated: bool) -> None:
    """Both operands are exact in float32, so only the order of the sums differs."""
    case = Case(FP8, 37, 192, 64)
    rounded = quantized.round_activations(case.x, FP8)
    assert rounded is not None
    numbers, scales = rounded
    case.x = numbers.float() * scales
    out = launch(numbers, case.by, tune, gated=gated, scaled=(scales, torch.float32))
    limit = 1e-3 if CUDA else 1e-5  # tensor cores sum FP8 in fewer bits
    expected = case.expected("linear")
    assert relative(out, plain.gated_mul(expected) if gated else expected) < limit


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tune", [MANY_TOKENS, *long(zip([SPLIT, SWAPPED]))], ids=str)
def test_products_of_rows_in_int8(tune: LinearTune, gated: bool) -> None:
    """Integers are summed exactly, so all is as the scheme's reference has it."""
    case = Case(INT8, 37, 192, 64)
    rounded = quantized.round_activations(case.x, INT8)
    assert rounded is not None
    numbers, scales = rounded
    out = launch(numbers, case.by, tune, gated=gated, scaled=(scales, torch.float32))
    expected = quantized.linear(case.x, case.by).double()
    assert relative(out, plain.gated_mul(expected) if gated else expected) < 1e-6


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_scaled_sums(has_bias: bool, adds: bool) -> None:
    case = Case(INT8, 3, 64, 1500, bias=has_bias)
    rounded = quantized.round_activations(case.x, INT8)
    assert rounded is not None
    numbers, scales = rounded
    sums = F.linear(numbers.cpu().int(), case.by.weight.cpu().int()).to(DEVICE)
    residual = case.residual.clone() if adds else None
    out = scaled_sums(sums, scales, case.by, torch.float32, residual)
    expected = quantized.linear(case.x, case.by)
    assert torch.equal(out, expected + case.residual if adds else expected)


@pytest.mark.parametrize("scheme", [FP8, INT8, int4(64)], ids=["fp8", "int8", "int4"])
@pytest.mark.parametrize("tokens", [1, *([40, 100] if CUDA else [])])
@pytest.mark.parametrize("activation", [SILU, CLAMPED])
def test_a_feed_forward_is_its_products(
    scheme: Scheme, tokens: int, activation: Activation
) -> None:
    dtype = torch.bfloat16 if CUDA else torch.float32
    first = Case(scheme, tokens, 128, 256, dtype)
    second = Case(scheme, tokens, 128, 64, dtype)
    second.x = first.made("norm_gated", None, activation)
    expected, out = second.made("linear_add", None), second.residual.clone()
    module.feed(out, first.x, first.norm, first.by, second.by, activation, fused=True)
    assert relative(out, expected.double()) < (1e-2 if CUDA else 1e-6)


@pytest.mark.parametrize("scheme", [FP8, int4(64)], ids=["fp8", "int4"])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("activation", [SILU, UNGATED])
@pytest.mark.parametrize("tokens", [1, *([40, 100] if CUDA else [])])
def test_rows_with_layer_norm_or_without_a_norm(
    scheme: Scheme, has_norm: bool, activation: Activation, tokens: int
) -> None:
    dtype = torch.bfloat16 if CUDA else torch.float32
    first = Case(scheme, tokens, 128, 256, dtype)
    second = Case(scheme, tokens, 128 if activation == SILU else 256, 64, dtype)
    bias = torch.ones_like(first.norm.weight)
    norm = Norm(first.norm.weight, EPS, bias, centered=True) if has_norm else None
    rows = first.x if norm is None else plain.normalise(first.x, norm)
    products = [
        (
            made.norm_linear(x, used, first.by),
            made.norm_gated(x, used, first.by, activation),
        )
        for made, x, used in ((module, first.x, norm), (quantized, first.x, norm))
    ]
    first.x = rows
    linear = first.made("linear", None)
    gated = plain.gated_mul(linear, activation)
    for of_rows, of_gates in products[: 1 if CUDA else 2]:
        limit = LIMIT[dtype] if scheme is not FP8 or CUDA else 5e-2  # rounded rows
        assert relative(of_rows, linear.double()) < limit
        assert relative(of_gates, gated.double()) < limit
    second.x = gated
    expected, out = second.made("linear_add", None), second.residual.clone()
    module.feed(out, rows, None, first.by, second.by, activation, fused=True)
    assert relative(out, expected.double()) < LIMIT[dtype]


@pytest.mark.long
@schemes
def test_many_tokens_are_multiplied_with_the_dequantized_matrix(scheme: Scheme) -> None:
    """On the GPU, this is for what the libraries of 8 bits do not take."""
    if CUDA and scheme.activations == "rows":
        pytest.skip("libraries round the activations")
    case = Case(scheme, 70, 192, 32)
    names: tuple[Name, ...] = ("norm_linear", "linear", "linear_add", "norm_gated")
    for name in names if CUDA else names[-2:]:
        case.check(name, None)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("gated", [False, True])
def test_constants_of_the_table(bits: int, gated: bool) -> None:
    """Groups divide a pass, or passes a group; rows are in order, and of enough rows."""
    for row in TABLE[bits, gated]:
        assert row.tune is not None
        depth = row.tune.depth
        assert all(depth % group == 0 or group % depth == 0 for group in (32, 64, 128))
        assert row.tune.rows == row.tokens == 1 or row.tune.rows >= 16
    scheme = INT8 if bits == 8 else int4(32)
    leaf_of_bits = Case(scheme, 1, 64, 32).by
    for dtype, count, is_tuned in (
        (torch.bfloat16, 1, True),
        (torch.float16, 16, True),
        (torch.bfloat16, 65, False),
        (torch.float32, 1, False),
    ):
        x = torch.empty(count, 64, dtype=dtype)
        assert (tune_of(x, leaf_of_bits, gated=gated) is not None) == is_tuned


def test_blocks_of_8_bits_stay_in_the_kernel() -> None:
    x = torch.empty(33, 128, dtype=torch.bfloat16)
    assert tune_of(x, Case(INT8, 1, 128, 32).by) is None
    assert tune_of(x, Case(FP8_BLOCKS, 1, 128, 32).by) is not None


@pytest.mark.long
def test_other_activations() -> None:
    case, activation = Case(ZEROS, 1, 64, 32), CLAMPED
    for tune in (ONE, None):
        out = case.made("norm_gated", tune, activation)
        assert relative(out, case.expected("norm_gated", activation)) < 1e-5


@pytest.mark.skipif(not CUDA, reason="the CPU's numbers are compared with the GPU's")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@schemes
def test_matrices_are_rounded_alike_on_all_devices(
    scheme: Scheme, dtype: torch.dtype
) -> None:
    matrix = torch.randn(384, 512, generator=torch.Generator().manual_seed(1)).to(dtype)
    on_cpu, on_gpu = (
        quantized.quantize(source, scheme, dtype) for source in (matrix, matrix.cuda())
    )
    assert on_cpu.weight.view(torch.uint8).equal(on_gpu.weight.cpu().view(torch.uint8))
    assert on_cpu.scales.float().equal(on_gpu.scales.cpu().float())
    for ours, theirs in zip(on_cpu[2:], on_gpu[2:], strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or (theirs is not None and ours.equal(theirs.cpu()))


@pytest.mark.skipif(not CUDA, reason="libraries of the GPU")
@pytest.mark.parametrize("scheme", [FP8, INT8], ids=["fp8", "int8"])
@pytest.mark.parametrize("tokens", [17, 100])
def test_libraries_in_8_bits(scheme: Scheme, tokens: int) -> None:
    """Against the scheme's reference, which rounds activations too. Integer sums are
    exact, so results are equal but for the norm's rounding.
    """
    case = Case(scheme, tokens, 256, 96, torch.bfloat16)
    out, expected = module.linear(case.x, case.by), quantized.linear(case.x, case.by)
    if scheme is INT8:
        assert torch.equal(out, expected)
    assert relative(out, expected.double()) < 5e-3
    names: tuple[Name, ...] = ("norm_linear", "linear_add", "norm_gated")
    for name in names:
        assert relative(case.made(name, None), case.expected(name)) < 5e-2


@pytest.mark.parametrize("gated", [False, True])
def test_constants_for_rounded_rows(gated: bool) -> None:
    fp8_leaf = Case(FP8, 1, 64, 32).by
    for tokens, is_tuned in ((17, True), (64, True), (65, False)):
        x = torch.empty(tokens, 64)
        tune = rounded_tune_of(x, fp8_leaf, gated=gated)
        assert (tune is not None) == is_tuned
        assert tune is None or tune.rows >= min(tokens, 32)
    assert rounded_tune_of(x, Case(INT8, 1, 64, 32).by, gated=gated) is None


@pytest.mark.skipif(not CUDA, reason="real shapes are for the GPU")
@schemes
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 64, 100])
def test_real_shapes(scheme: Scheme, dtype: torch.dtype, tokens: int) -> None:
    limit = 5e-2 if scheme.activations == "rows" and tokens > 16 else LIMIT[dtype]
    shapes: list[tuple[Name, int, int]] = [
        ("norm_linear", 3584, 4608),
        ("linear", 3584, 3584),
        ("linear_add", 18944, 3584),
        ("norm_gated", 3584, 37888),
    ]
    for name, ins, outs in shapes:
        case = Case(scheme, tokens, ins, outs, dtype)
        assert relative(case.made(name, None), case.expected(name)) < limit, name


@pytest.mark.skipif(not CUDA, reason="CUDA graphs")
@schemes
@pytest.mark.parametrize("tokens", [1, 8, 40, 100])
def test_in_a_cuda_graph(scheme: Scheme, tokens: int) -> None:
    case = Case(scheme, tokens, 256, 512, torch.bfloat16)
    case.made("norm_gated", None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.made("norm_gated", None)
    for seed in range(3):
        torch.manual_seed(seed)
        case.x.normal_()
        graph.replay()
        assert torch.equal(case.made("norm_gated", None), out)

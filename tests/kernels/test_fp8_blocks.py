"""Products of many tokens with FP8 in blocks, by the library or, without a GPU, by one in
plain torch that takes the same layout.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve
from torch import Tensor

from minfer.kernels import fp8_blocks, fused_linear, plain, quantized, target
from minfer.kernels import quantized_linear as module
from minfer.kernels.fp8_blocks import BLOCK, rounded
from minfer.kernels.leaves import FP8, FP8_BLOCKS, Activation, Linear
from minfer.kernels.quantized_kernels import round_groups
from minfer.kernels.quantized_tunes import MAX_BLOCKS_TOKENS, max_blocks_tokens
from minfer.kernels.target import HOPPER
from tests.circles import long

from .conftest import CUDA
from .test_quantized_linear import CLAMPED, DEVICE, SILU, UNGATED, Case, Name, relative

# The interpreter multiplies bfloat16 wrongly.
DTYPE = torch.bfloat16 if CUDA else torch.float32
TOKENS = MAX_BLOCKS_TOKENS + 6  # which no multiple of 4 is
PARTS = ((256,), (128, 384), (128, 80), (208,))  # outputs of whole blocks but the last
RAGGED = ((192, 128), (200,), (120, 8, 128))
is_hopper = CUDA and torch.cuda.get_device_capability() == HOPPER

pytestmark = [
    pytest.mark.usefixtures("poisoned", "library"),
    pytest.mark.filterwarnings("ignore:overflow encountered"),
    pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation"),
    pytest.mark.skipif(CUDA and not is_hopper, reason="only Hopper has such a product"),
]


@pytest.fixture
def library() -> Iterator[None]:
    """Without a GPU, there seem to be one and its library."""
    with pytest.MonkeyPatch.context() as patch:
        if not CUDA:
            patch.setattr(F, "scaled_mm", multiplied)
            patch.setattr(fp8_blocks, "DTYPE", DTYPE)
            patch.setattr(torch.version, "cuda", "13.0")
            patch.setattr(target, "default_capability", HOPPER)
        yield


def multiplied(
    numbers: Tensor,
    weight: Tensor,
    scales: Tensor,
    kind: Any,
    blocks: Tensor,
    block_kind: Any,
    bias: Tensor | None,
    output_dtype: torch.dtype,
) -> Tensor:
    """`scaled_mm`, which refuses tensors in another layout, or gives wrong results."""
    (rows, inputs), outputs = numbers.shape, weight.shape[1]
    groups = inputs // BLOCK
    padded = -(-groups // 4) * 4
    assert kind == F.ScalingType.BlockWise1x128
    assert block_kind == F.ScalingType.BlockWise128x128
    assert rows % 4 == inputs % 16 == outputs % 16 == 0
    assert scales.shape == (rows, groups)
    assert blocks.shape == (padded, -(-outputs // BLOCK))
    by_column = weight.t(), scales.t(), blocks.t()
    assert all(each.is_contiguous() for each in (numbers, *by_column))
    wide = numbers.float() * scales.repeat_interleave(BLOCK, 1)
    factors = blocks.t()[:, :groups].repeat_interleave(BLOCK, 0)[:outputs]
    matrix = weight.t().float() * factors.repeat_interleave(BLOCK, 1)
    out = F.linear(wide, matrix, None if bias is None else bias.float())
    return out.to(output_dtype)


def fused(parts: tuple[int, ...], inputs: int) -> Linear:
    """Returns a leaf of several matrices, each of which begins with a block."""
    draw = torch.Generator().manual_seed(sum(parts))
    matrices = [
        quantized.quantize(
            torch.randn(outputs, inputs, generator=draw), FP8_BLOCKS, torch.bfloat16
        )
        for outputs in parts
    ]
    return Linear(
        weight=torch.cat([matrix.weight for matrix in matrices]).to(DEVICE),
        scales=torch.cat([matrix.scales for matrix in matrices]).to(DEVICE),
        scheme=FP8_BLOCKS,
        parts=parts,
    )


def case_of(outputs: int, tokens: int = TOKENS, bias: bool = True) -> Case:
    """Returns a product whose leaf is as a model has it."""
    case = Case(FP8_BLOCKS, tokens, 5 * BLOCK, outputs, DTYPE, bias)
    case.by = module.prepare(case.by)
    return case


@pytest.mark.parametrize("parts", PARTS, ids=str)
@pytest.mark.parametrize("groups", [1, 4, 6])
def test_scales_of_whole_blocks(parts: tuple[int, ...], groups: int) -> None:
    leaf = fused(parts, groups * BLOCK)
    blocks = module.prepare(leaf).blocks
    assert blocks is not None
    assert blocks.shape == (-(-sum(parts) // BLOCK), -(-groups // 4) * 4)
    spread = blocks[:, :groups].repeat_interleave(BLOCK, 0)[: sum(parts)]
    assert spread.equal(leaf.scaled)


def test_leaves_that_are_not_of_whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for parts in RAGGED:
        assert module.prepare(fused(parts, 256)).blocks is None
    assert module.prepare(fused((128,), 192)).blocks is None
    assert module.prepare(Case(FP8, 1, 128, 128).by).blocks is None
    whole = fused((256,), 256)
    assert module.prepare(whole).select(slice(16, 128)).blocks is None
    orders = whole.scaled.roll(64, 0)  # as if outputs were stored in another order
    assert module.prepare(evolve(whole, scales=orders)).blocks is None
    experts = evolve(whole, weight=whole.weight[None], scales=whole.scaled[None])
    assert module.prepare(experts).blocks is None
    monkeypatch.setattr(fp8_blocks, "capability", lambda _: (10, 0))
    assert module.prepare(whole).blocks is None


@pytest.mark.parametrize(
    ("version", "has_it"),
    [("13.0", True), ("12.9", True), ("12.8", False), ("9.2", False), (None, False)],
)
def test_versions_of_cuda(
    version: str | None, has_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "version", SimpleNamespace(cuda=version))
    leaf = fused((128,), 128)
    assert (module.prepare(leaf).blocks is not None) == has_it


@pytest.mark.parametrize("groups", [1, *long([3, 28])])
@pytest.mark.parametrize("before", ["", "norm", "silu", UNGATED, *long(["clamped"])])
def test_rounded_groups(groups: int, before: str) -> None:
    case = Case(FP8_BLOCKS, 3, groups * BLOCK, 8)
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
    numbers, scales = rounded(x, norm, activation)
    assert (len(numbers), len(scales)) == (16, 16)
    numbers, scales = numbers[:3], scales[:3]
    expected = quantized.round_activations(unrounded, FP8_BLOCKS)
    assert expected is not None
    torch.testing.assert_close(scales, expected[1], rtol=1e-2 if before else 0, atol=0)
    values, wide = (
        each.float() * factors.repeat_interleave(BLOCK, 1)
        for each, factors in ((numbers, scales), expected)
    )
    if before:  # another rounding before moves a number to its neighbour at times
        assert relative(values, wide.double()) < 5e-3
    else:
        assert torch.equal(numbers.float(), expected[0].float())
    by_row = round_groups(x, numbers.dtype, BLOCK, norm, activation)
    assert by_row[0].float().equal(numbers.float())
    assert by_row[1].equal(scales)


@pytest.mark.parametrize("outputs", [256, 208])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_the_references(outputs: int, bias: bool) -> None:
    """The scheme's reference rounds activations, too."""
    case = case_of(outputs, bias=bias)
    by = evolve(case.by, blocks=None)
    out = module.linear(case.x, case.by)
    assert relative(out, quantized.linear(case.x, by).double()) < 5e-3
    out = module.norm_linear(case.x, case.norm, case.by)
    assert relative(out, quantized.norm_linear(case.x, case.norm, by).double()) < 1e-2
    activations: list[Activation] = ["silu", "clamped", "ungated_relu2"]
    for activation in activations:
        out = module.norm_gated(case.x, case.norm, case.by, activation)
        expected = quantized.norm_gated(case.x, case.norm, by, activation)
        assert relative(out, expected.double()) < 1e-2
    for wide in (case.residual, torch.cat([case.residual, case.residual], 1)):
        out = wide.clone()[:, :outputs]  # contiguous, and not
        module.linear_add(out, case.x, case.by)
        expected = case.residual.clone()
        quantized.linear_add(expected, case.x, by)
        assert relative(out, expected.double()) < 1e-2
    names: tuple[Name, ...] = ("linear", "norm_linear", "linear_add", "norm_gated")
    for name in names:
        assert relative(case.made(name, None), case.expected(name)) < 6e-2


def test_rows_of_any_layout() -> None:
    """Apart in memory; or their numbers, as modules of transformers may transpose what
    they multiply.
    """
    case = case_of(128)
    expected = module.linear(case.x, case.by)
    wide = torch.cat([case.x, case.x], 1)
    for x in (wide[:, : case.by.inputs], case.x.t().contiguous().t()):
        assert not x.is_contiguous()
        assert module.linear(x, case.by).equal(expected)


@pytest.mark.parametrize("activation", [SILU, *long([CLAMPED, UNGATED])])
@pytest.mark.parametrize("is_whole", [True, False])
def test_a_feed_forward_is_its_products(activation: Activation, is_whole: bool) -> None:
    """Also where the library takes only one of its matrices."""
    gated = activation != UNGATED
    first, second = case_of(5 * BLOCK * (1 + gated)), case_of(256)
    if not is_whole:
        second.by = evolve(second.by, blocks=None)
    second.x = first.made("norm_gated", None, activation)
    expected, out = second.made("linear_add", None), second.residual.clone()
    module.feed(out, first.x, first.norm, first.by, second.by, activation, fused=True)
    assert relative(out, expected.double()) < 1e-2


def test_few_tokens_stay_in_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """And other leaves and dtypes are dequantized, if they are too many for it."""
    leaf, ways = case_of(256).by, list[str]()

    def noted(way: str) -> Any:
        def call(*_: object, **__: object) -> None:
            ways.append(way)

        return call

    monkeypatch.setattr(fp8_blocks, "DTYPE", torch.bfloat16)
    monkeypatch.setattr(module, "max_blocks_tokens", lambda _: 32)
    monkeypatch.setattr(fused_linear, "fits", lambda *_, **__: True)
    monkeypatch.setattr(fused_linear, "launch", noted("kernel"))
    monkeypatch.setattr(fused_linear, "linear", noted("multiplied"))
    monkeypatch.setattr(module, "_dequantized", noted("dequantized"))
    monkeypatch.setattr(module, "_rounded_product", noted("library"))

    def way(tokens: int, leaf: Linear, dtype: torch.dtype = torch.bfloat16) -> list[str]:
        ways.clear()
        module.linear(torch.zeros(tokens, leaf.inputs, dtype=dtype), leaf)
        return [*ways]

    ragged = evolve(leaf, blocks=None)
    exact = evolve(leaf, scheme=evolve(FP8_BLOCKS, activations="as they are"))
    dequantized = ["dequantized", "multiplied"]
    assert way(32, leaf) == way(32, ragged) == way(33, ragged) == ["kernel"]
    assert way(33, leaf) == way(65, leaf) == ["library"]
    assert way(65, ragged) == way(65, exact) == dequantized
    assert way(33, leaf, torch.float16) == ["kernel"]
    assert way(65, leaf, torch.float16) == dequantized
    monkeypatch.setattr(fused_linear, "fits", lambda *_, **__: False)
    assert way(32, leaf) == dequantized  # few tokens are not rounded


def test_the_library_takes_large_matrices_from_fewer_tokens_on() -> None:
    def most(outputs: int) -> int:
        weight = torch.empty(outputs, 2048, device="meta", dtype=torch.float8_e4m3fn)
        return max_blocks_tokens(Linear(weight=weight, parts=(outputs,)))

    assert most(12_288) < most(4096) == MAX_BLOCKS_TOKENS


@pytest.mark.skipif(not CUDA, reason="real shapes are for the GPU")
@pytest.mark.parametrize("tokens", [65, 256, 1001])
def test_real_shapes(tokens: int) -> None:
    for inputs, outputs in ((2048, 12_288), (7168, 1536), (384, 576), (18_432, 512)):
        case = Case(FP8_BLOCKS, tokens, inputs, outputs, torch.bfloat16)
        expected = quantized.linear(case.x, case.by)
        case.by = module.prepare(case.by)
        assert case.by.blocks is not None
        assert relative(module.linear(case.x, case.by), expected.double()) < 5e-3


@pytest.mark.skipif(not CUDA, reason="CUDA graphs")
@pytest.mark.parametrize("tokens", [66, 128])
def test_in_a_cuda_graph(tokens: int) -> None:
    case = case_of(512, tokens)
    case.made("norm_gated", None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.made("norm_gated", None)
    for seed in range(3):
        torch.manual_seed(seed)
        case.x.normal_()
        graph.replay()
        assert torch.equal(case.made("norm_gated", None), out)

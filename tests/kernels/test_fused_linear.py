"""Products with norm, gate and sum inside, against float64."""

import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minfer import kernels
from minfer.kernels import fused_linear, plain
from minfer.kernels.fused_linear import linear, linear_add, norm_gated, norm_linear
from minfer.kernels.leaves import Linear, Norm
from minfer.kernels.linear_tunes import TABLE, LinearTune, Product, TuneEntry
from minfer.kernels.pdl import arrivals
from tests.circles import claimed

from .conftest import CUDA

DEVICE = "cuda" if CUDA else "cpu"
# Under the interpreter, products of bfloat16 are wrong.
TYPES = [torch.float32, torch.float16, *([torch.bfloat16] if CUDA else [])]
LIMIT = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
EPS = 1e-5
# rows, columns, depth, splits, warps, stages. One token a program:
ONE = LinearTune(1, 16, 64, 1, 2, 1)
# Tokens, depth, columns: some tiles are full, of others a part is left at the end.
CASES = [
    (ONE, 1, 128, 32),
    (ONE, 2, 80, 16),
    (LinearTune(1, 32, 128, 1, 4, 3), 3, 80, 48),
    (LinearTune(16, 16, 64, 1, 4, 3), 16, 128, 32),
    (LinearTune(16, 32, 32, 1, 2, 2), 2, 80, 48),
]
SPLIT = [
    (LinearTune(16, 16, 32, 2, 2, 2), 17, 96, 32),
    (LinearTune(16, 16, 64, 4, 4, 2), 1, 16, 16),
    (LinearTune(1, 16, 32, 2, 2, 1), 2, 128, 32),
]
MORE_SPLIT = [
    (LinearTune(1, 16, 32, 3, 2, 1), 2, 112, 32),
    (LinearTune(16, 32, 32, 7, 4, 2), 3, 208, 48),
    (LinearTune(1, 16, 32, 3, 2, 1), 2, 128, 32),
]

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings(
        "ignore:overflow encountered"
    ),  # exp of -gate: silu is 0 there
    pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation"),
]
types = pytest.mark.parametrize("dtype", TYPES, ids=str)


class Case:
    """Tensors of a product, and what must come of it in float64."""

    def __init__(
        self,
        tokens: int,
        ins: int,
        outs: int,
        dtype: torch.dtype = torch.float32,
        scale: float = 1,
    ) -> None:
        draw = torch.Generator(DEVICE).manual_seed(tokens * ins + outs)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw, device=DEVICE).to(dtype)

        self.x, self.norm = scale * randn(tokens, ins), Norm(randn(ins), EPS)
        self.residual = randn(tokens, outs)
        self.weight, self.bias = randn(outs, ins) / math.sqrt(ins), randn(outs)
        if CUDA:  # weights are there before the kernel before a product is launched
            torch.cuda.synchronize()

    def leaf(self, bias: bool = False) -> Linear:
        bias_vector = self.bias if bias else None
        return Linear(weight=self.weight, bias=bias_vector, parts=(len(self.weight),))

    def expected(self, normed: bool, bias: bool) -> Tensor:
        x = self.x.double()
        if normed:
            x = F.rms_norm(x, (x.shape[1],), self.norm.weight.double(), EPS)
        return F.linear(x, self.weight.double(), self.bias.double() if bias else None)

    def norm_linear(self, tune: LinearTune | None, bias: bool = True) -> None:
        x = self.x.clone()
        close(
            norm_linear(self.x, self.norm, self.leaf(bias), tune),
            self.expected(True, bias),
        )
        assert torch.equal(self.x, x)

    def linear(self, tune: LinearTune | None, bias: bool = True) -> None:
        close(linear(self.x, self.leaf(bias), tune), self.expected(False, bias))

    def linear_add(self, tune: LinearTune | None, bias: bool = True) -> None:
        expected = self.residual.double() + self.expected(False, bias)
        linear_add(self.residual, self.x, self.leaf(bias), tune)
        close(self.residual, expected)

    def norm_gated(self, tune: LinearTune | None, bias: bool = True) -> None:
        gate, up = self.expected(True, bias).chunk(2, 1)
        close(
            norm_gated(self.x, self.norm, self.leaf(bias), tune=tune),
            F.silu(gate) * up,
        )


def close(out: Tensor, expected: Tensor) -> None:
    assert out.shape == expected.shape
    error = (out.double() - expected).norm() / expected.norm().clamp(min=1e-9)
    assert error < LIMIT[out.dtype], f"relative error {error:.2e}"


def checked(
    case: Case, name: Product, tune: LinearTune | None, bias: bool = True
) -> None:
    getattr(case, name)(tune, bias)


@pytest.mark.long
@types
@pytest.mark.parametrize(("tune", "tokens", "ins", "outs"), CASES, ids=str)
def test_every_function(
    dtype: torch.dtype, tune: LinearTune, tokens: int, ins: int, outs: int
) -> None:
    case = Case(tokens, ins, outs, dtype)
    case.norm_linear(tune, bias=tokens > 1)
    case.linear_add(tune, bias=tokens > 1)
    Case(tokens, ins, 2 * outs, dtype).norm_gated(tune, bias=tokens > 1)


@types
@pytest.mark.parametrize(
    ("tune", "tokens", "ins", "outs"), [*SPLIT, *claimed(MORE_SPLIT)], ids=str
)
def test_splits(
    dtype: torch.dtype, tune: LinearTune, tokens: int, ins: int, outs: int
) -> None:
    case, tiles = (
        Case(tokens, ins, outs, dtype),
        -(-tokens // tune.rows) * -(-outs // tune.columns),
    )
    first = norm_linear(case.x, case.norm, case.leaf(), tune=tune)
    assert not arrivals(first.device, tiles).any(), (
        "counts must be zero for the next launch"
    )
    assert torch.equal(norm_linear(case.x, case.norm, case.leaf(), tune=tune), first)
    case.norm_linear(tune)
    case.norm_gated(tune)
    case.linear_add(tune)


@pytest.mark.long
@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("tokens", [1, 2, 7, 33])
def test_constants_of_the_table(name: Product, tokens: int) -> None:
    dtype = TYPES[-1] if CUDA else torch.float32
    checked(Case(tokens, 80, 32, dtype), name, None)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What the kernel came to, of each call that it took."""
    launch, results = fused_linear.launch, list[Tensor]()

    def spy(*arguments: Any, **options: Any) -> Tensor:
        results.append(launch(*arguments, **options))
        return results[-1]

    monkeypatch.setattr(fused_linear, "launch", spy)
    return results


@pytest.mark.long
@pytest.mark.parametrize("name", TABLE)
def test_few_tokens_take_the_kernel(name: Product, launched: list[Tensor]) -> None:
    for dtype in TYPES:
        checked(Case(1, 64, 32, dtype), name, None)
    assert len(launched) == len(TYPES)


@pytest.mark.long
@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize(
    ("tokens", "ins", "outs"), [(1, 100, 32), (2, 64, 34), (70, 16, 16), (0, 32, 32)]
)
def test_other_shapes(
    name: Product, tokens: int, ins: int, outs: int, launched: list[Tensor]
) -> None:
    checked(Case(tokens, ins, outs), name, None)
    assert not launched


@pytest.mark.parametrize("name", TABLE)
def test_strided_tensors(name: Product) -> None:
    case = Case(2, 64, 64)
    case.x, case.weight = (
        torch.cat((case.x, case.x), 1)[:, :64],
        case.weight.t().contiguous().t(),
    )
    checked(case, name, None)
    case = Case(2, 64, 64)
    case.residual = torch.cat((case.residual, case.residual), 1)[:, :64]
    checked(case, name, ONE)


@pytest.mark.parametrize("name", TABLE)
def test_the_reference(name: Product, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "interpreting", False)
    monkeypatch.setattr(fused_linear, "product", None)
    monkeypatch.setattr(f"{__name__}.DEVICE", "cpu")
    for tune, bias in ((ONE, True), (None, False)):
        checked(Case(2, 64, 32), name, tune, bias)


@pytest.mark.long
@pytest.mark.parametrize("tokens", [1, 4])
def test_large_float16_activations(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """x times the norm's weight is beyond float16."""
    entry = TuneEntry(16, 999, LinearTune(16, 16, 64, 1, 4, 3))
    monkeypatch.setitem(TABLE, "norm_gated", [*TABLE["norm_gated"][:3], entry])
    case = Case(tokens, 64, 32, torch.float16, scale=1e4)
    case.norm.weight.mul_(30)
    case.weight /= 30
    case.norm_linear(None)
    case.norm_gated(None)


def test_silu_of_large_gates() -> None:
    case = Case(1, 16, 32)
    case.weight *= 1e4
    case.norm_gated(ONE)


@functools.cache
def real_shapes() -> list[tuple[Product, int, int]]:
    """(function, in, out) of Qwen2.5 0.5B, 1.5B and 7B, and of Phi-4."""
    sizes = [
        (896, 1152, 4864),
        (1536, 2048, 8960),
        (3584, 4608, 18944),
        (5120, 7680, 17920),
    ]
    return [
        shape
        for hidden, qkv, inter in sizes
        for shape in (
            ("norm_linear", hidden, qkv),
            ("linear_add", hidden, hidden),
            ("linear", inter // 2, hidden),
            ("norm_gated", hidden, 2 * inter),
            ("linear_add", inter, hidden),
        )
    ]


@types
@pytest.mark.parametrize("tune", [None, ONE], ids=str)
def test_rows_with_layer_norm_or_without_a_norm(
    dtype: torch.dtype, tune: LinearTune | None
) -> None:
    case = Case(2, 80, 64, dtype)
    bias = case.residual.new_ones(80)
    layer_norm = Norm(case.norm.weight, EPS, bias, centered=True)
    leaf, wide = case.leaf(bias=True), case.x.double()
    factors, shift = layer_norm.weight.double(), bias.double()
    for norm, rows in (
        (layer_norm, F.layer_norm(wide, (80,), factors, shift, EPS)),
        (None, wide),
    ):
        expected = F.linear(rows, case.weight.double(), case.bias.double())
        gate, up = expected.chunk(2, 1)
        close(norm_linear(case.x, norm, leaf, tune), expected)
        close(norm_gated(case.x, norm, leaf, tune=tune), F.silu(gate) * up)
        close(plain.norm_linear(case.x, norm, leaf), expected)
        close(plain.norm_gated(case.x, norm, leaf), F.silu(gate) * up)
        gelu = norm_gated(case.x, norm, leaf, "ungated_gelu", tune=tune)
        close(gelu, F.gelu(expected))


@pytest.mark.skipif(not CUDA, reason="real shapes are for the GPU")
@types
@pytest.mark.parametrize("tokens", [1, 2, 7, 16, 32, 50])
def test_real_shapes(dtype: torch.dtype, tokens: int) -> None:
    for name, ins, outs in real_shapes():
        checked(Case(tokens, ins, outs, dtype), name, None)


@pytest.mark.skipif(not CUDA, reason="CUDA graphs")
@pytest.mark.parametrize("tokens", [1, 8])
def test_in_a_cuda_graph(tokens: int) -> None:
    case = Case(tokens, 256, 512, torch.bfloat16)
    weight = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16) / 16
    down = Linear(weight=weight, parts=(256,))
    residual = case.x.clone()

    def layer() -> Tensor:
        hidden = norm_gated(residual, case.norm, case.leaf(bias=True))
        linear_add(residual, hidden, down, tune=LinearTune(16, 32, 32, 4, 4, 2))
        return norm_linear(residual, case.norm, case.leaf())

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    for seed in range(3):
        torch.manual_seed(seed)
        case.x.normal_()
        residual.copy_(case.x)
        graph.replay()
        replayed = out.clone()
        residual.copy_(case.x)
        assert torch.equal(layer(), replayed)

"""Sums of chosen experts against plain torch, in both paths."""

from collections.abc import Iterator

import pytest
import torch
from attrs import evolve
from torch import Tensor

from minfer import kernels
from minfer.kernels import experts as module
from minfer.kernels import plain_experts
from minfer.kernels.experts import add_experts, experts_hit, max_tile_count
from minfer.kernels.experts_tunes import (
    FEW_TOKENS_TABLE,
    FLOAT32_TUNE,
    GROUPED_TABLE,
    DownTune,
    ExpertsTune,
    FewTokensTune,
    GateUpTune,
    GroupedTune,
    ManyTokensTune,
    tune_of,
)
from minfer.kernels.leaves import UNGATED, Activation, ChosenExperts, Experts, Linear
from minfer.kernels.pdl import arrivals
from tests.circles import claimed, long

from .conftest import CUDA

DEVICE = "cuda" if CUDA else "cpu"
# Under the interpreter, products of bfloat16 are wrong.
TYPES = [torch.float32, torch.float16, *([torch.bfloat16] if CUDA else [])]
LIMIT = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# Small tiles, so that there are several of each kind.
FEW_TILES = FewTokensTune(GateUpTune(16, 64, 2, 1), DownTune(32, 32, 2, 2))
ROWS_FIRST = ManyTokensTune(
    16, GroupedTune(16, 64, 4, 2, 1, False), GroupedTune(32, 32, 4, 2, 2, False)
)
LINES_FIRST = ManyTokensTune(
    16, GroupedTune(32, 32, 4, 2, 2, True), GroupedTune(64, 64, 4, 2, 1, True)
)
TUNES = {"few": FEW_TILES, "rows": ROWS_FIRST, "lines": LINES_FIRST}
# Tokens, experts, top_k, hidden, inter; some tiles are full, others are not.
FIRST = [(1, 4, 1, 32, 16), (2, 3, 1, 48, 24)]
LONG = [(2, 5, 2, 48, 24), (5, 7, 3, 80, 40), (3, 60, 8, 64, 16), (37, 2, 1, 32, 16)]
CLAIMED = [
    (21, 4, 2, 32, 48),
    (70, 13, 5, 64, 32),
    (33, 6, 6, 96, 56),
    (17, 24, 4, 40, 100),
]
SHAPES = [*FIRST, *long(zip(LONG)), *claimed(zip(CLAIMED))]
ACTIVATIONS: list[Activation] = ["silu", "gelu_tanh", "clamped", "ungated_relu2"]

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered"),
    pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation"),
]
both = pytest.mark.parametrize("tune", TUNES.values(), ids=[*TUNES])


class Case:
    """A layer's experts, and tokens with the experts that they chose."""

    def __init__(
        self,
        tokens: int,
        experts: int,
        top_k: int,
        hidden: int,
        inter: int,
        dtype: torch.dtype = torch.float32,
        activation: Activation = "silu",
        bias: bool = False,
    ) -> None:
        draw = torch.Generator(DEVICE).manual_seed(tokens * experts + hidden)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw, device=DEVICE).to(dtype)

        self.x, self.residual = randn(tokens, hidden), randn(tokens, hidden)
        scores = torch.rand(tokens, experts, generator=draw, device=DEVICE)
        weights, ids = scores.topk(top_k)
        self.choice = ChosenExperts(ids.int(), weights)
        parts = (inter,) if activation in UNGATED else (inter, inter)
        self.experts = Experts(
            gate_up=Linear(
                weight=2 * randn(experts, sum(parts), hidden) / hidden**0.5,
                bias=randn(experts, sum(parts)) if bias else None,
                parts=parts,
            ),
            down=Linear(
                weight=randn(experts, hidden, inter) / inter**0.5,
                bias=randn(experts, hidden) if bias else None,
                parts=(hidden,),
            ),
            activation=activation,
        )

    def expected(self) -> Tensor:
        """The sum without the residual, in float32."""
        layer = self.experts
        wide = evolve(layer, gate_up=widened(layer.gate_up), down=widened(layer.down))
        out = torch.zeros_like(self.residual, dtype=torch.float32)
        plain_experts.add_experts(out, self.x.float(), wide, self.choice)
        return out

    def made(self, tune: ExpertsTune | None) -> Tensor:
        out = self.residual.clone()
        add_experts(out, self.x, self.experts, self.choice, tune)
        return out

    def check(self, tune: ExpertsTune | None) -> None:
        out, expected = self.made(tune), self.residual.float() + self.expected()
        assert out.isfinite().all()
        error = (out.float() - expected).norm() / expected.norm()
        assert error < LIMIT[out.dtype], f"relative error {error:.2e}"

    def pad(self, *rows: int) -> None:
        """Make padding of these tokens, which hold anything."""
        for row in rows:
            self.choice.ids[row] = -1
            self.choice.weights[row] = torch.nan
            self.x[row] = torch.nan

    def forget_others(self) -> None:
        """Experts that no token chose hold NaN."""
        hit = {*self.choice.ids.flatten().tolist()}
        for expert in {*range(len(self.experts.down.weight))} - hit:
            self.experts.gate_up.weight[expert] = torch.nan
            self.experts.down.weight[expert] = torch.nan


def widened(leaf: Linear) -> Linear:
    bias = None if leaf.bias is None else leaf.bias.float()
    return evolve(leaf, weight=leaf.weight.float(), bias=bias)


@both
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(tune: ExpertsTune, shape: tuple[int, int, int, int, int]) -> None:
    Case(*shape).check(tune)


@pytest.mark.long
@both
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_biases(
    tune: ExpertsTune, dtype: torch.dtype, bias: bool, activation: Activation
) -> None:
    Case(3, 5, 2, 48, 32, dtype, activation, bias).check(tune)


@both
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_weights_of_inputs(tune: ExpertsTune, bias: bool) -> None:
    case = Case(5, 6, 2, 48, 32, bias=bias)
    by_outputs = case.expected()
    case.experts = evolve(case.experts, weighs_inputs=True)
    case.check(tune)
    assert (case.expected() - by_outputs).norm() > 0.1 * by_outputs.norm()


@both
def test_padding_and_experts_that_are_not_hit_are_not_read(tune: ExpertsTune) -> None:
    case = Case(3, 8, 1, 32, 16)
    case.pad(1)
    case.forget_others()
    out, expected = case.made(tune), case.residual + case.expected().nan_to_num()
    torch.testing.assert_close(out[::2], expected[::2])
    assert torch.equal(out[1], case.residual[1])


@both
@pytest.mark.long
def test_a_tokens_bits_depend_on_no_other_token(tune: ExpertsTune) -> None:
    """Among the same, in another order, and among others that choose other experts."""
    case = Case(9, 5, 2, 32, 16)
    together, order = case.made(tune), torch.arange(8, -1, -1, device=DEVICE)
    turned = Case(9, 5, 2, 32, 16)
    turned.x, turned.residual = case.x[order], case.residual[order]
    turned.choice = ChosenExperts(case.choice.ids[order], case.choice.weights[order])
    assert torch.equal(turned.made(tune)[order], together)
    case.pad(0, 1, 2, 3)
    assert torch.equal(case.made(tune)[4:], together[4:])


def choices() -> Iterator[tuple[int, list[list[int]]]]:
    """Numbers of experts, and ids of tokens."""
    draw = torch.Generator().manual_seed(0)
    for tokens, experts, top_k in ((1, 4, 1), (3, 4, 4), (40, 6, 2), (70, 13, 3)):
        scores = torch.rand(tokens, experts, generator=draw)
        yield experts, scores.topk(top_k).indices.tolist()
    yield 3, [[2]] * 33  # all of one expert
    yield 3, [[-1]] * 5  # padding alone
    yield 60, [[59, 0], [-1, -1], [0, 58]]


@pytest.mark.parametrize(("experts", "ids"), [*choices()])
@pytest.mark.parametrize("chunk", [16, 1024])
def test_tiles_hold_the_pairs_of_experts_that_are_hit_and_no_others(
    experts: int, ids: list[list[int]], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    rows = 16
    choice = ChosenExperts(
        torch.tensor(ids, dtype=torch.int32, device=DEVICE), torch.empty(0)
    )
    result = module._Tiles(choice, experts, rows)
    lists, (count, *fields) = result.lists.tolist(), result.tiles.tolist()
    assert result.max_tiles == max_tile_count(choice.ids.numel(), experts, rows) >= count
    tiles = [
        fields[i * result.max_tiles : i * result.max_tiles + count] for i in range(3)
    ]
    pairs_of = dict[int, list[int]]()
    for expert, first, left in zip(*tiles, strict=True):
        assert first == len(pairs_of.setdefault(expert, []))
        pairs_of[expert] += lists[expert][first : first + left]
    pairs = choice.ids.flatten().tolist()
    expected = {
        expert: {i for i, chosen in enumerate(pairs) if chosen == expert}
        for expert in {*pairs}
    }
    expected.pop(-1, None)
    assert {expert: {*indices} for expert, indices in pairs_of.items()} == expected
    assert sum(map(len, pairs_of.values())) == sum(map(len, expected.values()))
    assert count == sum(-(-len(indices) // rows) for indices in expected.values())
    assert int(experts_hit(choice)) == len(expected)
    assert not arrivals(result.lists.device, 1 + experts).any()


@pytest.mark.parametrize("experts", [8, 60, 128])
def test_constants_by_shape(experts: int) -> None:
    layer, wide = (
        Experts(
            gate_up=Linear(weight=torch.empty(experts, 2, 1, dtype=dtype), parts=(1, 1)),
            down=Linear(weight=torch.empty(experts, 1, 1, dtype=dtype), parts=(1,)),
        )
        for dtype in (torch.bfloat16, torch.float32)
    )
    few_tokens = FEW_TOKENS_TABLE[0].tune
    assert tune_of(1, 8, layer) == tune_of(1, 8, wide) == few_tokens
    tunes = [tune_of(tokens, 4, layer) for tokens in range(1, 64 * experts, 3)]
    order = [few_tokens, *(row.tune for row in GROUPED_TABLE)]
    assert [*dict.fromkeys(tunes)] == order
    assert tunes == sorted(tunes, key=order.index)
    assert tune_of(experts, 1, wide) == FLOAT32_TUNE
    down = Linear(weight=torch.empty(experts, 1, 9999), parts=(1,))
    long = Experts(gate_up=layer.gate_up, down=down)
    assert tune_of(1, 8, long) == FEW_TOKENS_TABLE[-1].tune


@pytest.mark.long
@pytest.mark.parametrize("tokens", [1, 9])
def test_constants_of_the_tables(tokens: int) -> None:
    Case(tokens, 3, 2, 48, 32).check(None)


@pytest.mark.parametrize("tune", [FEW_TILES, ROWS_FIRST], ids=["few", "grouped"])
def test_strided_rows(tune: ExpertsTune) -> None:
    case = Case(2, 3, 1, 32, 16)
    case.x = torch.cat((case.x, case.x), 1)[:, :32]
    wide = torch.cat((case.residual, case.residual), 1)
    out = wide[:, :32]
    add_experts(out, case.x, case.experts, case.choice, tune)
    torch.testing.assert_close(out, case.residual + case.expected())
    assert torch.equal(wide[:, 32:], case.residual)


def test_other_tensors_take_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "tune_of", None)
    turned = Case(2, 3, 2, 32, 16)
    turned.x = turned.x.t().contiguous().t()
    turned.check(None)
    Case(0, 3, 2, 32, 16).made(None)
    monkeypatch.setattr(kernels, "interpreting", False)
    monkeypatch.setattr(f"{__name__}.DEVICE", "cpu")
    Case(2, 3, 2, 32, 16).check(None)


@pytest.mark.skipif(not CUDA, reason="real shapes are for the GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 8, 64, 300, 1100, 4096])
def test_real_shapes(dtype: torch.dtype, tokens: int) -> None:
    Case(tokens, 128, 8, 2048, 768, dtype).check(None)
    Case(tokens, 32, 4, 2880, 2880, dtype, "clamped", bias=True).check(None)


@pytest.mark.skipif(not CUDA, reason="CUDA graphs")
@pytest.mark.parametrize("tokens", [1, 9, 200])
def test_in_a_cuda_graph(tokens: int) -> None:
    """The choice of a replay is another than that of the capture."""
    case = Case(tokens, 16, 4, 256, 128, torch.bfloat16)
    case.made(None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.made(None)
    for seed in range(3):
        torch.manual_seed(seed)
        scores = torch.rand(tokens, 16, device="cuda")
        case.choice.ids.copy_(scores.topk(4).indices)
        case.choice.ids[seed::5] = -1
        graph.replay()
        assert torch.equal(case.made(None), out)

"""Sums of quantized experts against plain torch in float32, with dequantized matrices."""

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve

from minfer.kernels import plain_experts, quantized, target
from minfer.kernels.experts_tunes import (
    FLOAT32_TUNE,
    FP8_BLOCKS_FEW_TOKENS,
    QUANTIZED_FEW_TOKENS,
    QUANTIZED_GROUPED_TABLE,
    ROUNDED_GROUPED_TABLE,
    DownTune,
    ExpertsTune,
    FewTokensTune,
    GateUpTune,
    GroupedTune,
    ManyTokensTune,
    grouped_from,
    tune_of,
)
from minfer.kernels.leaves import (
    FP8,
    FP8_BLOCKS,
    INT8,
    MXFP4,
    NVFP4,
    PLAIN,
    Experts,
    Linear,
    Scheme,
)

from .conftest import CUDA
from .test_experts import TYPES, Case
from .test_quantized_linear import LIMIT, relative, schemes

# Small tiles, so that there are several of each kind.
TUNES: dict[str, ExpertsTune] = {
    "few": FewTokensTune(GateUpTune(16, 64, 2, 1), DownTune(32, 32, 2, 2)),
    "few wide": FewTokensTune(GateUpTune(16, 256, 2, 1), DownTune(32, 256, 2, 2)),
    "rows": ManyTokensTune(
        16, GroupedTune(16, 64, 4, 2, 1, False), GroupedTune(32, 32, 4, 2, 2, False)
    ),
    "lines": ManyTokensTune(
        16, GroupedTune(32, 128, 4, 2, 2, True), GroupedTune(64, 64, 4, 2, 1, True)
    ),
}

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered"),
    pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation"),
]


def stored(leaf: Linear, scheme: Scheme) -> Linear:
    form = quantized.quantize(leaf.weight, scheme, leaf.weight.dtype)
    return evolve(leaf, **form._asdict(), scheme=scheme)


def after_nan(leaf: Linear) -> Linear:
    """The matrices with NaN before the first one's factors, where a kernel would read
    those of expert -1.
    """
    if leaf.factors is None:
        return leaf
    padded = torch.cat([torch.full_like(leaf.factors[:1], torch.nan), leaf.factors])
    return evolve(leaf, factors=padded[1:])


def widened(leaf: Linear) -> Linear:
    bias = None if leaf.bias is None else leaf.bias.float()
    weight = quantized.dequantize(leaf)
    wide = evolve(leaf, weight=weight, scheme=PLAIN, bias=bias, scales=None)
    return evolve(wide, zeros=None, factors=None)


def check(case: Case, scheme: Scheme, tune: ExpertsTune | None) -> None:
    layer = case.experts
    case.experts = Experts(
        gate_up=stored(layer.gate_up, scheme),
        down=stored(layer.down, scheme),
        activation=layer.activation,
    )
    out = case.made(tune)
    expected = case.residual.float()
    wide = evolve(
        case.experts,
        gate_up=widened(case.experts.gate_up),
        down=widened(case.experts.down),
    )
    plain_experts.add_experts(expected, case.x.float(), wide, case.choice)
    error = relative(out, expected.double())
    assert error < LIMIT[out.dtype], f"relative error {error:.2e}"


@pytest.mark.long
@schemes
@pytest.mark.parametrize("tune", TUNES.values(), ids=[*TUNES])
def test_schemes(scheme: Scheme, tune: ExpertsTune) -> None:
    check(Case(2, 3, 1, 192, 64), scheme, tune)


# Activations are rounded: gates and ups in groups of 128, which a tile has.
ROUNDED = {
    "rows": ManyTokensTune(
        16,
        GroupedTune(128, 128, 4, 2, 2, False),
        GroupedTune(64, 64, 4, 2, 1, False),
        rounded=True,
    ),
    "lines": ManyTokensTune(
        16,
        GroupedTune(128, 64, 4, 2, 1, True),
        GroupedTune(32, 128, 4, 2, 2, True),
        rounded=True,
    ),
}


def rounded(x: torch.Tensor) -> torch.Tensor:
    numbers_and_scales = quantized.round_activations(x, FP8_BLOCKS)
    assert numbers_and_scales is not None
    numbers, scales = numbers_and_scales
    return numbers.double() * scales.double().repeat_interleave(128, -1)


@pytest.mark.long
@pytest.mark.parametrize("tune", ROUNDED.values(), ids=[*ROUNDED])
def test_rounded_activations(tune: ManyTokensTune) -> None:
    """Of inputs, and of what the gates multiplied."""
    case = Case(21, 3, 2, 256, 384, TYPES[1])
    layer = case.experts
    matrices = [stored(leaf, FP8_BLOCKS) for leaf in (layer.gate_up, layer.down)]
    case.experts = Experts(
        gate_up=matrices[0], down=matrices[1], activation=layer.activation
    )
    error = relative(case.made(tune), expected_of_rounded(case))
    assert error < 2e-3, f"relative error {error:.2e}"


def expected_of_rounded(case: Case) -> torch.Tensor:
    """The sums of experts in FP8 with blocks, whose inputs, and what the gates
    multiplied, are rounded.
    """
    expected, x = case.residual.double(), rounded(case.x)
    layer, choice = case.experts, case.choice
    matrices = quantized.dequantize(layer.gate_up), quantized.dequantize(layer.down)
    for expert, (gate_up, down) in enumerate(zip(*matrices, strict=True)):
        token, place = (choice.ids == expert).nonzero(as_tuple=True)
        gates, ups = (x[token] @ gate_up.double().T).chunk(2, -1)
        outputs = rounded(F.silu(gates) * ups) @ down.double().T
        shares = choice.weights[token, place].double()
        expected.index_add_(0, token, shares[:, None] * outputs)
    return expected


@schemes
def test_one_token(scheme: Scheme) -> None:
    check(Case(1, 2, 1, 64, 32 if scheme.group == 32 else 64), scheme, TUNES["few"])


@pytest.mark.long
@pytest.mark.parametrize("scheme", [FP8, MXFP4, NVFP4], ids=["fp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("dtype", TYPES[1:], ids=str)
@pytest.mark.parametrize("tune", [TUNES["few"], TUNES["rows"]], ids=["few", "rows"])
def test_biases(scheme: Scheme, tune: ExpertsTune, dtype: torch.dtype) -> None:
    check(Case(2, 3, 2, 64, 32, dtype, "clamped", bias=True), scheme, tune)


@pytest.mark.long
@schemes
def test_padding_is_not_read(scheme: Scheme) -> None:
    for tune in (TUNES["few"], TUNES["rows"]):
        case = Case(2, 3, 1, 64, 64)
        case.x[0] = torch.nan
        case.choice.ids[0] = -1
        case.choice.weights[0] = torch.nan
        case.experts = evolve(
            case.experts,
            gate_up=after_nan(stored(case.experts.gate_up, scheme)),
            down=after_nan(stored(case.experts.down, scheme)),
        )
        out = case.made(tune)
        assert torch.equal(out[0], case.residual[0])
        assert out.isfinite().all()


@pytest.mark.long
@pytest.mark.parametrize(
    ("scheme", "tokens"), [(MXFP4, 1), (NVFP4, 2), (INT8, 5)], ids=str
)
def test_constants_of_the_tables(scheme: Scheme, tokens: int) -> None:
    check(Case(tokens, 2, 1, 64, 32), scheme, None)


@schemes
def test_constants_by_shape(scheme: Scheme) -> None:
    down = stored(Case(1, 8, 1, 64, 64).experts.down, scheme)
    layer = Experts(gate_up=down, down=down)
    few_tokens = QUANTIZED_FEW_TOKENS[scheme.bits]
    if scheme == FP8_BLOCKS:
        few_tokens = FP8_BLOCKS_FEW_TOKENS
    assert tune_of(1, 8, layer) == few_tokens
    tunes = [tune_of(tokens, 4, layer) for tokens in range(1, 512, 3)]
    assert [*dict.fromkeys(tunes)] == [
        few_tokens,
        *(row.tune for row in QUANTIZED_GROUPED_TABLE),
    ]
    assert tune_of(64, 4, layer, is_float32=True) == FLOAT32_TUNE


def test_many_rows_are_rounded_where_groups_and_the_gpu_allow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def tunes(scheme: Scheme, inter: int) -> list[ExpertsTune]:
        down = stored(Case(1, 8, 1, 256, inter).experts.down, scheme)
        layer = Experts(gate_up=down, down=down)
        return [tune_of(tokens, 4, layer) for tokens in (16, 48, 4096)]

    rounding = [row.tune for row in ROUNDED_GROUPED_TABLE]
    if not CUDA:
        assert tunes(FP8_BLOCKS, 256) != rounding
        monkeypatch.setattr(target, "default_capability", (8, 9))
    assert tunes(FP8_BLOCKS, 256) == rounding
    assert not any(row in rounding for row in tunes(FP8_BLOCKS, 192))
    assert not any(row in rounding for row in tunes(FP8, 256))


@pytest.mark.skipif(not CUDA, reason="real shapes are for the GPU")
@schemes
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 8, 64, 300, 1100])
def test_real_shapes(scheme: Scheme, dtype: torch.dtype, tokens: int) -> None:
    case = Case(tokens, 32, 8, 2048, 768, dtype)
    if scheme == FP8_BLOCKS and tokens >= grouped_from(8, 32):
        layer = case.experts
        gate_up, down = stored(layer.gate_up, scheme), stored(layer.down, scheme)
        case.experts = evolve(layer, gate_up=gate_up, down=down)
        expected = expected_of_rounded(case)
        assert relative(case.made(None), expected) < 2 * LIMIT[dtype]
    else:
        check(case, scheme, None)
    if scheme.group in (0, 32, 64):
        case = Case(tokens, 16, 4, 2880, 2880, dtype, "clamped", bias=True)
        check(case, scheme, None)

"""What quack is given, by a stand-in with its signature; on a GPU that has it, itself."""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minfer.kernels import fused_linear
from minfer.kernels.fused_linear import norm_gated
from minfer.kernels.gated import QUACK_ACTIVATIONS, gated, is_gated_faster
from minfer.kernels.leaves import Activation, Linear, Norm
from minfer.kernels.packages import QUACK, missing
from tests.kernels.test_attention import DEVICE

TANH_ERROR = 2**-11
SUM_ERROR = 1e-3  # of a product of sums in float32, for values up to 20
REAL = missing(QUACK, torch.float16, torch.device(DEVICE)) == ""


def stand_in(
    a: Tensor,
    b: Tensor,
    *,
    activation: str,
    postact_out: Tensor,
    store_preact: bool,
    tuned: bool,
    concat_layout: tuple[str, ...],
) -> None:
    """quack's meaning, for halves of b that stand one after the other."""
    assert (store_preact, tuned, concat_layout) == (False, False, ("B",))
    gate, up = (a.float() @ b.float()).chunk(2, -1)
    if activation == "geglu":
        postact_out.copy_(F.gelu(gate, approximate="tanh") * up)
    else:
        assert activation == "swiglu"
        postact_out.copy_(F.silu(gate) * up)


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    if not REAL:
        monkeypatch.setitem(sys.modules, QUACK, SimpleNamespace(gemm_act=stand_in))


def activated(gate: Tensor, activation: Activation) -> Tensor:
    if activation == "silu":
        return F.silu(gate)
    assert activation == "gelu_tanh"
    return F.gelu(gate, approximate="tanh")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # its own
@pytest.mark.parametrize("activation", QUACK_ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "hidden", "inter"), [(3, 64, 96), (300, 128, 200)])
def test_gate_times_up(
    tokens: int, hidden: int, inter: int, dtype: torch.dtype, activation: Activation
) -> None:
    x = torch.randn(tokens, hidden, device=DEVICE).to(dtype)
    weight = (torch.randn(2 * inter, hidden, device=DEVICE) * 0.3).to(dtype)
    gate, up = (x.double() @ weight.double().t()).chunk(2, -1)
    expected = activated(gate, activation) * up
    out = gated(x, Linear(weight=weight, parts=(inter, inter)), activation)
    assert out.dtype is dtype
    near = 2e-3 if dtype is torch.float16 else 1e-2
    assert (out - expected).norm() <= near * expected.norm()
    # Of negative gates gelu is a small difference, in which the error of quack's tanh
    # stays: as much as if the gate had been rounded to 11 bits.
    limit = near * expected.abs() + TANH_ERROR * (gate * up).abs() + SUM_ERROR
    assert ((out - expected).abs() <= limit).all()


@pytest.mark.long
def test_it_serves_where_it_is_allowed_to_and_pays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served: list[tuple[int, Activation]] = []

    def counted(x: Tensor, gate_up: Linear, activation: Activation) -> Tensor:
        served.append((len(x), activation))
        return x.new_empty(len(x), len(gate_up.weight) // 2)

    monkeypatch.setattr(fused_linear, "gated", counted)
    monkeypatch.setattr(
        fused_linear, "is_gated_faster", lambda tokens, inter: (tokens, inter) >= (20, 16)
    )
    weight, norm = torch.randn(32, 16).half() / 8, Norm(torch.ones(16).half(), 1e-6)
    bias_vector = torch.ones(32).half()
    cases: list[tuple[int, bool, Tensor | None, Activation]] = [
        (20, False, None, "silu"),
        (19, True, None, "silu"),
        (20, True, bias_vector, "silu"),
        (20, True, None, "silu"),
        (21, True, None, "silu"),
        (19, True, None, "gelu_tanh"),
        (20, True, bias_vector, "gelu_tanh"),
        (20, True, None, "gelu_tanh"),
        (20, True, None, "clamped"),
    ]
    for tokens, fused, bias, activation in cases:
        leaf = Linear(weight=weight, bias=bias, parts=(16, 16))
        norm_gated(torch.randn(tokens, 16).half(), norm, leaf, activation, fused=fused)
    assert served == [(20, "silu"), (21, "silu"), (20, "gelu_tanh")]


@pytest.mark.parametrize(
    ("inter", "faster", "slower"),  # as measured
    [
        (18944, (256, 512, 768, 1024, 2048, 8192), (64, 128, 192, 320, 384)),
        (8960, (512, 768, 1024, 2048, 4096, 8192), (192, 256, 320, 384)),
        (4864, (256, 512, 768, 1024, 2048, 4096, 8192), (192, 320, 384)),
    ],
)
def test_it_pays_where_its_tiles_are_full(
    inter: int, faster: tuple[int, ...], slower: tuple[int, ...]
) -> None:
    assert all(is_gated_faster(tokens, inter) for tokens in faster)
    assert not any(is_gated_faster(tokens, inter) for tokens in slower)

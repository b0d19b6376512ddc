"""Gates of what attention returns: the kernel as float64 has them."""

import pytest
import torch

from minfer.kernels.head_gates import gate_heads
from minfer.kernels.leaves import GateActivation

from .conftest import CUDA

DEVICE = "cuda" if CUDA else "cpu"
ERRORS = {torch.float32: 1e-6, torch.float16: 2e-3}
pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize("dtype", ERRORS, ids=str)
@pytest.mark.parametrize("activation", ["softplus", "sigmoid"])
@pytest.mark.parametrize(("heads", "dim", "by_head"), [(3, 80, True), (6, 256, False)])
def test_heads_are_multiplied_with_their_gates(
    heads: int, dim: int, by_head: bool, activation: GateActivation, dtype: torch.dtype
) -> None:
    """Rows may be parts of wider ones."""
    count, draw = (heads if by_head else heads * dim), torch.Generator().manual_seed(1)
    wide, wide_gates = (
        torch.randn(5, size + 16, generator=draw).to(DEVICE, dtype)
        for size in (heads * dim, count)
    )
    x, gates = wide[:, : heads * dim], 4 * wide_gates[:, :count]
    exact = gates.double()
    factors = exact.sigmoid() if activation == "sigmoid" else exact.exp().log1p()
    expected = x.double().view(5, count, -1) * factors[..., None]
    rest = wide[:, heads * dim :].clone()
    gate_heads(x, gates, activation)
    difference = (x.double() - expected.view(5, -1)).abs()
    assert (difference / (1 + expected.view(5, -1).abs())).max() < ERRORS[dtype]
    assert torch.equal(wide[:, heads * dim :], rest)


@pytest.mark.parametrize("count", [3, 48])
def test_a_step_may_have_no_tokens_to_continue_with(count: int) -> None:
    x = torch.empty(0, 48, device=DEVICE)
    gate_heads(x, torch.empty(0, count, device=DEVICE), "softplus")
    assert x.shape == (0, 48)


def test_large_gates_lose_nothing() -> None:
    gates = torch.tensor([[-1e4, -80.0, -20.0, 19.9, 20.1, 300.0]], device=DEVICE)
    x = torch.ones(1, 6, device=DEVICE)
    gate_heads(x, gates, "softplus")
    expected = torch.nn.functional.softplus(gates.double()).float()
    torch.testing.assert_close(x, expected, rtol=1e-5, atol=0)

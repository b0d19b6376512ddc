"""Norms with a gate, against transformers' modules in float64."""

import pytest
import torch
from torch import Tensor, nn
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from minfer.kernels.gated_norm import NormGate, gated_norm
from minfer.kernels.leaves import Norm

from .test_fused import LIMIT, TYPES, error, randn

EPS, TOKENS, SIZE, GROUP = 1e-5, 5, 240, 48


def expected(module: nn.Module, weight: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    """Returns what a module of transformers gives, in float32."""
    module.load_state_dict({"weight": weight.float().cpu()})
    with torch.no_grad():
        out = module(x.float().cpu(), gate.float().cpu())
    return torch.as_tensor(out).double().flatten(1)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("family", ["qwen", "kimi", "zamba", "one group"])
def test_norms_with_a_gate(device: str, dtype: torch.dtype, family: str) -> None:
    wide, gates = (
        randn(TOKENS, SIZE + 16, dtype=dtype, device=device, seed=seed) for seed in (1, 2)
    )
    x, gate = wide[:, :SIZE], gates[:, 8 : SIZE + 8]
    group = SIZE if family == "one group" else GROUP
    size = SIZE if family in ("zamba", "one group") else GROUP
    weight = randn(size, dtype=dtype, device=device, seed=3)
    activation: NormGate = "sigmoid" if family == "kimi" else "silu"
    gate_first = size == SIZE
    if gate_first:
        # transformers' class has no types
        module: nn.Module = Zamba2RMSNormGated(SIZE, group, EPS)  # type: ignore[no-untyped-call]
        right = expected(module, weight, x, gate)
    else:
        kind = KimiLinearRMSNormGated if family == "kimi" else Qwen3NextRMSNormGated
        by_head = (t.reshape(TOKENS, -1, GROUP) for t in (x, gate))
        right = expected(kind(GROUP, eps=EPS), weight, *by_head)
    out = gated_norm(x, gate, Norm(weight, EPS), group, activation, gate_first=gate_first)
    assert out.dtype is dtype
    assert out.shape == x.shape
    assert error(out.cpu(), right) < LIMIT[dtype]

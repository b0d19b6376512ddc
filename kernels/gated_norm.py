"""RMSNorm over groups of what a recurrent layer returns, with a gate before or after it
(gated delta nets, Mamba 2).
"""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from minfer.kernels import on_triton
from minfer.kernels.leaves import Norm

NormGate = Literal["silu", "sigmoid"]


def gated_norm(
    x: Tensor,
    gate: Tensor,
    norm: Norm,
    group: int,
    activation: NormGate = "silu",
    *,
    gate_first: bool = False,
) -> Tensor:
    """Returns norm(x) * activation(gate), or norm(x * activation(gate)) if `gate_first`:
    [tokens, size], in the dtype of `x`.

    The norm is over each `group` of neighbours; its weight is [size], or [group] for all
    groups. `x` and `gate` [tokens, size], rows contiguous. float32 inside, rounded once.
    """
    if not on_triton(x) or not len(x):
        return _reference(x, gate, norm, group, activation, gate_first=gate_first)
    from minfer.kernels.gated_norm_kernels import launch  # not everywhere is Triton

    out = x.new_empty(x.shape)
    silu = activation == "silu"
    launch(x, gate, norm, out, group, silu=silu, gate_first=gate_first)
    return out


def _reference(
    x: Tensor,
    gate: Tensor,
    norm: Norm,
    group: int,
    activation: NormGate,
    *,
    gate_first: bool,
) -> Tensor:
    """`gated_norm` in plain torch."""
    wide = gate.float()
    factors = F.silu(wide) if activation == "silu" else wide.sigmoid()
    values = x.float() * factors if gate_first else x.float()
    by_group = values.view(len(x), -1, group)
    scaled = by_group * (by_group.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    weighted: Tensor = (scaled * norm.weight.float().view(-1, group)).flatten(1)
    return (weighted if gate_first else weighted * factors).to(x.dtype)

"""What gated_rule.py and its kernels compute with."""

from math import inf
from typing import NamedTuple

import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from minfer.kernels.paged_states import PagedUnits
from minfer.kernels.plain import SOFTPLUS_LINEAR_FROM
from minfer.kernels.state_work import StateWork


@frozen(eq=False)
class DecayGates:
    """What makes decay = -rates * step, with step = softplus(raw + bias), clamped."""

    raw: Tensor  # [tokens, heads], or of each key channel [tokens, heads, K]
    bias: Tensor  # [heads] or [heads, K] float32
    rates: Tensor  # [heads] float32: exp(A_log)
    # The smallest and the largest step
    low: float = 0.0
    high: float = inf

    @property
    def by_channel(self) -> bool:
        """Whether each key channel has a decay of its own."""
        return self.raw.dim() == 3

    def steps(self) -> Tensor:
        """Returns the steps in float32, in the shape of `raw`."""
        steps = F.softplus(self.raw.float() + self.bias, threshold=SOFTPLUS_LINEAR_FROM)
        return steps.clamp(self.low, self.high)

    def decays(self, steps: Tensor) -> Tensor:
        """Returns the decays, [tokens, heads, 1 or K]."""
        by_channel = steps if self.by_channel else steps[..., None]
        return -self.rates[:, None] * by_channel


class RuleArguments(NamedTuple):
    """The arguments of `gated_rule`."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: DecayGates
    beta: Tensor | None
    units: PagedUnits
    work: StateWork
    skip: Tensor | None
    l2_eps: float | None
    scale: float

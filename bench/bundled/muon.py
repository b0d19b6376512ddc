"""Muon: momentum whose matrices are made orthogonal before they are applied.

Each step turns a matrix by the same amount in all its directions, which small models
learn from faster than from Adam's steps. Embeddings and norms have no such directions:
they are for AdamW.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn

ROUNDS: Final = 5
# Of the polynomial that drives singular values towards 1, as Keller Jordan found them.
_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonal(stack: Tensor) -> Tensor:
    """The nearest orthogonal matrices, roughly, by Newton and Schulz's iteration."""
    x = stack
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(ROUNDS):
        square = x @ x.mT
        x = _A * x + (_B * square + _C * square @ square) @ x
    found: Tensor = x.mT if tall else x
    return found


class Muon:
    """The optimizer of matrices; those of one shape go together."""

    def __init__(
        self,
        matrices: Sequence[nn.Parameter],
        *,
        momentum: float = 0.95,
        decay: float = 0.1,
    ) -> None:
        self.matrices = list(matrices)
        self.momentum, self.decay = momentum, decay
        # Half the precision is enough, and halves what a checkpoint takes.
        self.moments = [
            torch.zeros_like(one, dtype=torch.bfloat16) for one in self.matrices
        ]
        self._stacks: dict[torch.Size, list[int]] = {}
        for at, one in enumerate(self.matrices):
            self._stacks.setdefault(one.shape, []).append(at)
        self.orthogonal = orthogonal

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Move all matrices by their gradients, which are gone afterwards."""
        for shape, places in self._stacks.items():
            own = [self.matrices[at] for at in places]
            weights = list[Tensor](own)
            moments = [self.moments[at] for at in places]
            gradients = [_gradient(one).bfloat16() for one in own]
            torch._foreach_lerp_(moments, gradients, 1 - self.momentum)
            torch._foreach_lerp_(
                gradients, moments, self.momentum
            )  # Nesterov's look ahead
            turned = self.orthogonal(torch.stack(gradients))
            scale = -rate * max(1.0, shape[0] / shape[1]) ** 0.5
            torch._foreach_mul_(weights, 1 - rate * self.decay)
            torch._foreach_add_(weights, list(turned.float().unbind()), alpha=scale)
        for one in self.matrices:
            one.grad = None


def _gradient(one: nn.Parameter) -> Tensor:
    if one.grad is None:
        raise ValueError("a matrix has no gradient: call backward first")
    return one.grad

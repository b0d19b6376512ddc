"""Whether weights are random, as before training, found without running the model.

Theory. A matrix [m, n] of independent draws with mean 0 and standard deviation s has no
direction that it prefers: its largest singular value comes to s (sqrt(m) + sqrt(n)), and
hardly ever beyond (the edge of Marchenko and Pastur's law, 1967; Bai and Yin, 1988).
Training grows directions that stand out. In the bundled model the matrix that stands out
most has 3.9 times the edge, in its draft 3.7; of a small random model none has more than
1.01 times. So weights in which no matrix is beyond 1.15 times its edge are random.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file
from torch import Tensor

from minfer.effects.models.checkpoint.checkpoint import shards

MAX_RATIO_TO_EDGE: Final = 1.15  # times the edge
# How names of tensors end that are not drawn: Mamba's rates are the same in each channel.
UNTRAINED_PATTERNS: Final = ("A_log",)
ITERATIONS: Final = 20  # of the power method, which nears the value from below


def looks_random(folder: Path) -> bool:
    """Whether no matrix of a checkpoint has a preferred direction."""
    return all(_share_of_edge(matrix) < MAX_RATIO_TO_EDGE for matrix in _matrices(folder))


def _matrices(folder: Path) -> Iterator[Tensor]:
    for path, _ in shards(folder):
        for name, tensor in load_file(path).items():
            if tensor.dim() > 1 and not name.endswith(UNTRAINED_PATTERNS):
                yield tensor.float().flatten(1)


def _share_of_edge(matrix: Tensor) -> float:
    """A matrix' largest singular value, as a share of what a random one has."""
    rows, columns = matrix.shape
    edge = matrix.square().mean().sqrt() * (rows**0.5 + columns**0.5)
    vector = torch.randn(columns, generator=torch.Generator().manual_seed(0))
    value = vector.norm()
    for _ in range(ITERATIONS):
        image = matrix @ (vector / value)
        vector = matrix.T @ (image / image.norm())
        value = vector.norm()
    return float(value / edge)

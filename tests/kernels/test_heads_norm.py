"""The norm over the queries of all heads, and over the keys, against float64."""

import pytest
import torch
from torch import Tensor

from minfer.kernels.heads_norm import norm_heads, square_sums
from minfer.kernels.leaves import Norm, WholeNorms

from .conftest import CUDA
from .test_fused import LIMIT, error, normed, randn

EPS = 1e-5
# Under the interpreter, rounding to bfloat16 truncates.
TYPES = [torch.float32, torch.float16, *([torch.bfloat16] if CUDA else [])]
pytestmark = pytest.mark.usefixtures("poisoned")
types = pytest.mark.parametrize("dtype", TYPES, ids=str)
sizes = pytest.mark.parametrize(("queries", "keys"), [(256, 64), (80, 240), (160, 160)])


class Heads:
    """Queries, keys and values of tokens, with the factors of queries and keys."""

    def __init__(self, device: str, dtype: torch.dtype, queries: int, keys: int):
        self.sizes = [queries, keys, keys]
        # A view into a wider tensor is a row stride that is not the row's length.
        wide = randn(5, sum(self.sizes) + 16, dtype=dtype, device=device)
        self.qkv = wide[:, : sum(self.sizes)]
        self.factors = [
            randn(size, dtype=dtype, device=device, seed=size) for size in (queries, keys)
        ]

    def expected(self) -> list[Tensor]:
        """Queries, keys and values as they must be, in float64."""
        query, key, value = self.qkv.double().split_with_sizes(self.sizes, 1)
        by_part = zip((query, key), self.factors, strict=True)
        return [*(normed(x, factor, EPS) for x, factor in by_part), value]

    def of_rank(self, rank: int) -> tuple[Tensor, WholeNorms]:
        """What one of two ranks has: half of the queries, keys and values."""
        parts = (
            part.chunk(2, 1)[rank] for part in self.qkv.split_with_sizes(self.sizes, 1)
        )
        factors = (factor.chunk(2)[rank].clone() for factor in self.factors)
        return torch.cat([*parts], 1), norms_of(*factors)


def norms_of(query: Tensor, key: Tensor) -> WholeNorms:
    return WholeNorms(Norm(query, EPS), Norm(key, EPS))


@types
@sizes
def test_all_heads_are_normalised_together(
    device: str, dtype: torch.dtype, queries: int, keys: int
) -> None:
    heads = Heads(device, dtype, queries, keys)
    expected, value = heads.expected(), heads.qkv[:, queries + keys :].clone()
    norm_heads(heads.qkv, norms_of(*heads.factors))
    parts = heads.qkv.split_with_sizes(heads.sizes, 1)
    for part, right in zip(parts[:2], expected[:2], strict=True):
        assert error(part, right) < 2 * LIMIT[dtype]
    assert torch.equal(parts[2], value)


@types
@sizes
def test_ranks_sum_their_squares(
    device: str, dtype: torch.dtype, queries: int, keys: int
) -> None:
    heads = Heads(device, dtype, queries, keys)
    expected = heads.expected()
    ranks = [heads.of_rank(rank) for rank in range(2)]
    first, second = (square_sums(*rank) for rank in ranks)
    assert first.dtype is torch.float32
    for rank, (qkv, norms) in enumerate(ranks):
        norm_heads(qkv, norms, first + second, ranks=2)
        right = torch.cat([part.chunk(2, 1)[rank] for part in expected], 1)
        assert error(qkv, right) < 2 * LIMIT[dtype]

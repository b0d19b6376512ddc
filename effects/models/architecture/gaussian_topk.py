"""Dense feed-forwards most of whose channels are zero (Gemma 3n), after `Dense`.

Theory. The first layers of Gemma 3n use of each token the largest gates alone: a gate
counts by how much it exceeds a cutoff, and is zero below it. Numbers are not sorted for
it: gates are about normally distributed, so that a share of them, `sparsity`, is below
their mean plus a number of standard deviations, the quantile of that share. Zeros are
multiplied like other numbers here.

With tensor parallelism, each rank has a part of a token's gates: means and variances of
all are those of the parts, which are summed over the ranks.
"""

from typing import TYPE_CHECKING, Final

from attrs import evolve

from minfer.effects.models.architecture.dense import Dense, DenseWeights
from minfer.effects.models.architecture.model_step import ModelStep
from minfer.effects.models.architecture.products import (
    activate,
    add_product,
    norm_linear,
)
from minfer.effects.models.config_reader import ConfigReader
from minfer.effects.models.families.family import Family
from minfer.effects.models.ranks import Communicator

if TYPE_CHECKING:
    from torch import Tensor

# Where a config has no shares: those of the first layers, if there are more.
DEFAULT_SPARSITY: Final = 0.95
DEFAULT_SPARSE_LAYERS: Final = 10


def with_cutoffs(
    reader: ConfigReader, family: Family, layers: list[Dense]
) -> list[Dense]:
    """Returns the feed-forwards with the cutoffs that a config gives them. Raises
    `ModelConfigError`.
    """
    key = family.feed_forward.sparsity
    if not key:
        return layers
    shares = reader.config.get(key)
    if shares is None:
        first = DEFAULT_SPARSE_LAYERS if len(layers) > DEFAULT_SPARSE_LAYERS else 0
        shares = [DEFAULT_SPARSITY] * first + [0.0] * (len(layers) - first)
    if (
        not isinstance(shares, list)
        or len(shares) != len(layers)
        or any(type(share) not in (int, float) or not 0 <= share < 1 for share in shares)
    ):
        raise reader.error(
            key,
            f"null or a list of num_hidden_layers = {len(layers)} numbers from 0 to "
            f"below 1",
        )
    from statistics import NormalDist  # which takes 20 ms

    return [
        evolve(dense, cutoff=NormalDist().inv_cdf(share)) if share else dense
        for dense, share in zip(layers, shares, strict=True)
    ]


def feed_sparse(
    sizes: Dense,
    weights: DenseWeights,
    hidden: "Tensor",
    step: ModelStep,
    cutoff: float,
    x: "Tensor | None" = None,
) -> None:
    """Add the feed-forward of `hidden` [tokens, hidden] to it, or that of normalised rows
    `x`: of each token's gates, what is above their mean plus `cutoff` standard
    deviations.
    """
    if not len(hidden):
        return  # torch warns of a variance of no tokens
    source, norm = (hidden, weights.norm) if x is None else (x, None)
    gate_up = norm_linear(source, norm, weights.gate_up, step.products)
    gate = gate_up[:, : sizes.intermediate_size]
    gate.sub_(_cutoffs(gate, cutoff, step.communicator)).relu_()
    inner = activate(gate_up, weights.gate_up, sizes.activation, step.products)
    add_product(
        hidden, inner, weights.down, step.products, step.communicator, weights.after
    )


def _cutoffs(gate: "Tensor", cutoff: float, communicator: Communicator) -> "Tensor":
    """Returns the cutoff of each token's gates: [tokens, 1] of this rank's [tokens,
    channels].
    """
    import torch

    deviation, mean = torch.std_mean(gate, -1, correction=0, keepdim=True)
    if not communicator.rank_info.has_whole_matrices:
        ranks = communicator.rank_info.parallel.tensor
        mean, deviation = mean.float(), deviation.float()
        moments = torch.cat((mean, deviation * deviation + mean * mean), 1)
        mean, squares = communicator.sum(moments).div_(ranks).chunk(2, 1)
        deviation = (squares - mean * mean).clamp_(min=0).sqrt_()
    return torch.add(mean, deviation, alpha=cutoff)

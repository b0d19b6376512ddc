"""Weights as a frozen tree: norms and embeddings are tensors, matrices `Linear` leaves.

Also random weights, from a spec alone.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from attrs import evolve, frozen

from minfer.effects.models.dtypes import torch_dtype
from minfer.effects.models.layers import LayerWeights, empty_layer, layer_parts
from minfer.effects.models.linear import Maker, norm_part
from minfer.effects.models.parts import Part
from minfer.effects.models.spec import EMBED, LM_HEAD, ModelSpec
from minfer.kernels.leaves import Linear, Norm

if TYPE_CHECKING:
    import torch

# Random values shared by all tensors: separate ones for each would take ten seconds.
POOL: Final = 2_000_003


@frozen(eq=False)
class Weights:
    """A model's weights; `lm_head` multiplies with `embed` itself when the embeddings are
    tied.
    """

    embed: "torch.Tensor"  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Norm  # [hidden]
    lm_head: Linear  # vocab outputs of hidden inputs


def empty_weights(spec: ModelSpec, dtype: str, device: str = "cpu") -> Weights:
    """Returns uninitialised weights of the right shapes, to be filled through
    `named_parts`.

    `dtype` is that of activations, and of matrices unless the spec has another for them.
    """
    spec = evolve(spec, dtype=dtype)
    make = Maker(dtype=dtype, weight_dtype=spec.weight_dtype, device=device)
    layers = tuple(empty_layer(layer, make) for layer in spec.layers)
    embed = head = make.matrix(spec.vocab_size, spec.hidden_size)
    if not spec.tie_word_embeddings:
        head = make.matrix(spec.vocab_size, spec.hidden_size)
    lm_head = Linear(weight=head, parts=(spec.vocab_size,))
    return Weights(embed, layers, make.norm(spec.hidden_size, spec.norms), lm_head)


def checkpoint_parts(
    spec: ModelSpec, weights: Weights, *, stacked: bool = False
) -> Iterator[Part]:
    """Yield the tensors of a checkpoint, with their places. `stacked`: the matrices of
    all experts of a layer are one tensor.
    """
    yield Part(EMBED, weights.embed)
    for i, (layer, its) in enumerate(zip(spec.layers, weights.layers, strict=True)):
        for part in layer_parts(layer, its, stacked=stacked):
            yield part.under(f"model.layers.{i}.")
    yield norm_part("model.norm", weights.norm, spec.norms)
    if not spec.tie_word_embeddings:
        yield Part(LM_HEAD, weights.lm_head.weight)


def named_parts(
    spec: ModelSpec, weights: Weights
) -> Iterator[tuple[str, "torch.Tensor"]]:
    """Yield each tensor's name in a checkpoint, and its place: a view into the fused
    tensors.
    """
    for part in checkpoint_parts(spec, weights):
        yield part.name, part.place


def random_weights(
    spec: ModelSpec, dtype: str, seed: int = 0, device: str = "cpu"
) -> Weights:
    """Returns weights drawn from N(0, initializer_range), norms 1; the same on every
    device.
    """
    import torch

    draw = torch.Generator().manual_seed(seed)
    pool = torch.empty(POOL).normal_(0.0, spec.initializer_range, generator=draw)
    pool = pool.to(device=device, dtype=torch_dtype(dtype))
    weights = empty_weights(spec, dtype, device)
    at = 0
    for name, tensor in named_parts(spec, weights):
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
            continue
        matrix = tensor.flatten(0, -2) if tensor.dim() > 1 else tensor[None]
        for part in torch.split(matrix, max(1, POOL // 8 // matrix.shape[1])):
            part.copy_(pool[at : at + part.numel()].view(part.shape))
            # Reads begin anywhere in the first half, so that rows are seldom equal.
            at = (at + part.numel() + 1) % (POOL // 2)
    return weights

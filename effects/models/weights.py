"""Weights as a frozen tree: norms and embeddings are tensors, matrices `Linear` leaves.

Also random weights, from a spec alone.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from attrs import evolve, frozen

from minfer.effects.models.dtypes import torch_dtype
from minfer.effects.models.formats.on_load import OnLoad
from minfer.effects.models.layers import (
    LayerWeights,
    empty_layer,
    finish_layer,
    layer_parts,
)
from minfer.effects.models.linear import Maker, norm_part
from minfer.effects.models.parts import Part
from minfer.effects.models.quantization import PLAIN_FILES, Files
from minfer.effects.models.spec import EMBED, LM_HEAD, ModelSpec, layer_prefix
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

    `dtype` is that of activations, and of what is not quantized.
    """
    make = Maker(dtype=dtype, device=device, quantization=spec.quantization)
    layers = tuple(
        empty_layer(layer, evolve(make, prefix=layer_prefix(i)))
        for i, layer in enumerate(spec.layers)
    )
    embed = head = make.matrix(spec.vocab_size, spec.hidden_size)
    if not spec.tie_word_embeddings:
        head = make.matrix(spec.vocab_size, spec.hidden_size)
    lm_head = Linear(weight=head, parts=(spec.vocab_size,))
    return Weights(embed, layers, make.norm(spec.hidden_size, spec.norms), lm_head)


def checkpoint_parts(
    spec: ModelSpec, weights: Weights, files: Files = PLAIN_FILES
) -> Iterator[Part]:
    """Yield the tensors of a checkpoint, with their places."""
    yield Part(EMBED, weights.embed)
    for i, (layer, its) in enumerate(zip(spec.layers, weights.layers, strict=True)):
        for part in layer_parts(layer, its, files):
            yield part.under(layer_prefix(i))
    yield norm_part("model.norm", weights.norm, spec.norms)
    if not spec.tie_word_embeddings:
        yield Part(LM_HEAD, weights.lm_head.weight)


def named_parts(
    spec: ModelSpec, weights: Weights
) -> Iterator[tuple[str, "torch.Tensor"]]:
    """Yield each tensor's name in an unquantized checkpoint, and its place: a view into
    the fused tensors.
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
    how = spec.quantization
    files = PLAIN_FILES if how is None else Files(OnLoad(how.format.scheme))
    at = 0
    for part in checkpoint_parts(spec, weights, files):
        if part.name.endswith("norm.weight"):
            part.place.fill_(1.0)
            continue
        drawn = part.place
        if part.take is not None:
            drawn = torch.empty(part.shape, dtype=pool.dtype, device=pool.device)
        matrix = drawn.flatten(0, -2) if drawn.dim() > 1 else drawn[None]
        for rows in torch.split(matrix, max(1, POOL // 8 // matrix.shape[1])):
            rows.copy_(pool[at : at + rows.numel()].view(rows.shape))
            # Reads begin anywhere in the first half, so that rows are seldom equal.
            at = (at + rows.numel() + 1) % (POOL // 2)
        if part.take is not None:
            part.fill(drawn)
    layers = (finish_layer(layer, dtype) for layer in weights.layers)
    return evolve(weights, layers=tuple(layers))

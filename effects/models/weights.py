"""Weights as a frozen tree of tensors, fused for execution, and random ones from a spec
alone.

Fusing (queries, keys and values in one matrix, gate and up in one) halves the matrix
products of a layer; at batch 1 each product costs a launch and a pass over its input.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from attrs import frozen

from minfer.effects.models.spec import (
    EMBED,
    LM_HEAD,
    ModelSpec,
    dtype_bytes,
    layer_tensors,
)

if TYPE_CHECKING:
    import torch

# draws that all random weights are read from: one for each takes ten seconds
POOL = 2_000_003
BY_COLUMN = 1 << 22  # elements: about where a matrix leaves the CPU's own cache


@frozen(eq=False, kw_only=True)
class LayerWeights:
    """One decoder layer; matrices are [out_features, in_features]. None: the model has
    none.
    """

    input_norm: "torch.Tensor"  # [hidden]
    qkv: "torch.Tensor"  # [(heads + 2 * kv_heads) * head_dim, hidden]
    qkv_bias: "torch.Tensor | None" = None  # [(heads + 2 * kv_heads) * head_dim]
    q_norm: "torch.Tensor | None" = None  # [head_dim]
    k_norm: "torch.Tensor | None" = None  # [head_dim]
    out: "torch.Tensor"  # [hidden, heads * head_dim]
    out_bias: "torch.Tensor | None" = None  # [hidden]
    post_norm: "torch.Tensor"  # [hidden]
    gate_up: "torch.Tensor"  # [2 * intermediate, hidden]
    gate_up_bias: "torch.Tensor | None" = None  # [2 * intermediate]
    down: "torch.Tensor"  # [hidden, intermediate]
    down_bias: "torch.Tensor | None" = None  # [hidden]


@frozen(eq=False)
class Weights:
    """A model's weights; `lm_head` is `embed` itself when the embeddings are tied."""

    embed: "torch.Tensor"  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: "torch.Tensor"  # [hidden]
    lm_head: "torch.Tensor"  # [vocab, hidden]


def torch_dtype(name: str) -> "torch.dtype":
    """The torch dtype of that name. Raises `UnsupportedModelError` for one that does not
    run.
    """
    import torch

    dtype_bytes(name)
    return {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }[name]


def empty_weights(spec: ModelSpec, dtype: str, device: str = "cpu") -> Weights:
    """Uninitialised weights of the right shapes, to be filled through `named_parts`."""
    import torch

    kind, place = torch_dtype(dtype), torch.device(device)

    def make(*shape: int) -> "torch.Tensor":
        # Large float32 matrices with more outputs than inputs are stored by column on the
        # CPU: there a product with few rows is twice as fast (MKL), and no slower with
        # many.
        turned = place.type == "cpu" and kind is torch.float32 and shape[0] > shape[-1]
        if turned and math.prod(shape) >= BY_COLUMN:
            return torch.empty(shape[::-1], dtype=kind).t()
        return torch.empty(shape, dtype=kind, device=place)

    shapes: dict[str, tuple[int, ...]] = {}
    for _, field, (rows, *rest) in layer_tensors(spec):
        shapes[field] = (rows + shapes.get(field, (0,))[0], *rest)
    each = (
        {field: make(*shape) for field, shape in shapes.items()}
        for _ in range(spec.layers)
    )
    layers = tuple(LayerWeights(**fields) for fields in each)
    embed = make(spec.vocab_size, spec.hidden_size)
    head = embed if spec.tie_word_embeddings else make(spec.vocab_size, spec.hidden_size)
    return Weights(embed, layers, make(spec.hidden_size), head)


def named_parts(
    spec: ModelSpec, weights: Weights
) -> Iterator[tuple[str, "torch.Tensor"]]:
    """Yield each tensor's name in a checkpoint, and its place: a view into the fused
    tensors.
    """
    yield EMBED, weights.embed
    for i, layer in enumerate(weights.layers):
        ends: dict[
            str, int
        ] = {}  # field -> where its next part begins, below the last one
        for name, field, shape in layer_tensors(spec):
            start = ends.get(field, 0)
            ends[field] = start + shape[0]
            yield f"model.layers.{i}.{name}", getattr(layer, field)[start : ends[field]]
    yield "model.norm.weight", weights.norm
    if not spec.tie_word_embeddings:
        yield LM_HEAD, weights.lm_head


def random_weights(
    spec: ModelSpec, dtype: str, seed: int = 0, device: str = "cpu"
) -> Weights:
    """Weights drawn from N(0, initializer_range), norms 1; the same on every device."""
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
        matrix = tensor if tensor.dim() == 2 else tensor[None]
        for part in torch.split(matrix, max(1, POOL // 8 // matrix.shape[1])):
            part.copy_(pool[at : at + part.numel()].view(part.shape))
            # Reads begin anywhere in the first half, so that rows seldom coincide.
            at = (at + part.numel() + 1) % (POOL // 2)
    return weights

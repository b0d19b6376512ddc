"""Weights as a frozen tree of tensors, fused for execution, and random ones from a spec alone.

Fusing (queries, keys and values in one matrix, gate and up in one) halves the matrix products of
a layer; at batch 1 each product costs a launch and a pass over its input.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from attrs import frozen

from minfer.effects.spec import ModelSpec, dtype_bytes, layer_shapes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Roles of the checkpoint that live side by side in one fused tensor, in this order.
FUSED = {
    "qkv": ("q", "k", "v"),
    "qkv_bias": ("q_bias", "k_bias", "v_bias"),
    "gate_up": ("gate", "up"),
    "gate_up_bias": ("gate_bias", "up_bias"),
}
POOL = 2_000_003
BY_COLUMN = 1 << 22  # elements: about where a matrix leaves the CPU's own cache


@frozen(eq=False, kw_only=True)
class LayerWeights:
    """One decoder layer; matrices are [out_features, in_features]. None: the model has none."""

    input_norm: "Tensor"  # [hidden]
    qkv: "Tensor"  # [(heads + 2 * kv_heads) * head_dim, hidden]
    qkv_bias: "Tensor | None" = None  # [(heads + 2 * kv_heads) * head_dim]
    q_norm: "Tensor | None" = None  # [head_dim]
    k_norm: "Tensor | None" = None  # [head_dim]
    out: "Tensor"  # [hidden, heads * head_dim]
    out_bias: "Tensor | None" = None  # [hidden]
    post_norm: "Tensor"  # [hidden]
    gate_up: "Tensor"  # [2 * intermediate, hidden]
    gate_up_bias: "Tensor | None" = None  # [2 * intermediate]
    down: "Tensor"  # [hidden, intermediate]
    down_bias: "Tensor | None" = None  # [hidden]


@frozen(eq=False)
class Weights:
    """A model's weights; `lm_head` is `embed` itself when the embeddings are tied."""

    embed: "Tensor"  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: "Tensor"  # [hidden]
    lm_head: "Tensor"  # [vocab, hidden]


def torch_dtype(name: str) -> "torch.dtype":
    """The torch dtype of that name. Raises `UnsupportedModelError` for one that does not run."""
    import torch

    dtype_bytes(name)
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def fused_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Field of `LayerWeights` -> shape; fields that the family lacks are left out."""
    shapes = layer_shapes(spec)
    for fused, parts in FUSED.items():
        sizes = [shapes.pop(part) for part in parts if part in shapes]
        if sizes:
            shapes[fused] = (sum(size[0] for size in sizes), *sizes[0][1:])
    return shapes


def empty_weights(spec: ModelSpec, dtype: str, device: "torch.device | str" = "cpu") -> Weights:
    """Uninitialised weights of the right shapes, to be filled through `named_parts`."""
    import torch

    kind, place = torch_dtype(dtype), torch.device(device)

    def make(*shape: int) -> "Tensor":
        # Large float32 matrices with more outputs than inputs are stored by column on the CPU:
        # there a product with few rows is twice as fast (MKL), and no slower with many.
        if (
            place.type == "cpu"
            and kind is torch.float32
            and math.prod(shape) >= BY_COLUMN
            and shape[0] > shape[-1]
        ):
            return torch.empty(shape[::-1], dtype=kind).t()
        return torch.empty(shape, dtype=kind, device=place)

    shapes = fused_shapes(spec)
    layers = tuple(
        LayerWeights(**{role: make(*shape) for role, shape in shapes.items()})
        for _ in range(spec.layers)
    )
    embed = make(spec.vocab_size, spec.hidden_size)
    head = embed if spec.tie_word_embeddings else make(spec.vocab_size, spec.hidden_size)
    return Weights(embed, layers, make(spec.hidden_size), head)


def named_parts(spec: ModelSpec, weights: Weights) -> Iterator[tuple[str, "Tensor"]]:
    """Yield (checkpoint name, view into the fused tensors), in the order of `expected_tensors`."""
    names, shapes = spec.family.names, layer_shapes(spec)
    yield names["embed"], weights.embed
    for i, layer in enumerate(weights.layers):
        for role, tensor in _layer_parts(layer, shapes):
            yield spec.family.layer_names[role].format(i=i), tensor
    yield names["norm"], weights.norm
    if not spec.tie_word_embeddings:
        yield names["lm_head"], weights.lm_head


def _layer_parts(
    layer: LayerWeights,
    shapes: dict[str, tuple[int, ...]],
) -> Iterator[tuple[str, "Tensor"]]:
    whole = {part: (fused, parts) for fused, parts in FUSED.items() for part in parts}
    for role, shape in shapes.items():
        fused, parts = whole.get(role, (role, (role,)))
        start = sum(shapes[part][0] for part in parts[: parts.index(role)])
        yield role, getattr(layer, fused)[start : start + shape[0]]


def random_weights(
    spec: ModelSpec, dtype: str, seed: int = 0, device: "torch.device | str" = "cpu"
) -> Weights:
    """Weights drawn from N(0, initializer_range), norms 1: for speed work without a checkpoint.

    The same spec, dtype and seed give the same weights on every device. All tensors are read from
    one pool of two million draws, as drawing half a billion takes ten seconds.
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
        else:
            at = _fill(tensor, pool, at)
    return weights


def _fill(tensor: "Tensor", pool: "Tensor", at: int) -> int:
    """Fill a vector or matrix from `pool`, from the offset `at`; returns the next offset."""
    import torch

    width = tensor.shape[-1]
    rows = max(1, (POOL // 8) // width)
    for part in torch.split(tensor.view(1, -1) if tensor.dim() == 1 else tensor, rows):
        part.copy_(pool[at : at + part.numel()].view(part.shape))
        # Reads begin anywhere in the first half, so that rows seldom coincide.
        at = (at + part.numel() + 1) % (POOL // 2)
    return at

"""Random weights of a model, from its spec alone."""

import re
from collections.abc import Iterable, Mapping
from math import prod
from typing import TYPE_CHECKING, Final

from attrs import evolve

from minfer.effects.models.architecture.layers import finish_layer
from minfer.effects.models.architecture.quantization import (
    PLAIN_FORM,
    CheckpointForm,
    Quantization,
)
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.weights import (
    Weights,
    checkpoint_parts,
    empty_weights,
    expected_parts,
)
from minfer.effects.models.dtypes import torch_dtype
from minfer.effects.models.formats.on_load import OnLoad
from minfer.effects.models.layout.rank_parts import RankPart, rank_parts
from minfer.effects.models.parts import WeightPart
from minfer.effects.models.ranks import WHOLE_MODEL, RankInfo

if TYPE_CHECKING:
    import torch

# Random values shared by all tensors: separate ones for each would take ten seconds.
IS_NORM: Final = re.compile(r"norm(\.\d+)?\.weight$")  # names of norms' factors
ONES: Final = (  # how names of tensors end that are 1, too
    "layernorm_1.weight",
    "layernorm_2.weight",
    "layer_scalar",
    "router.scale",
    "per_expert_scale",
    "correct_output_scale",
    "pre_fc_norm_embedding.weight",
    "pre_fc_norm_hidden.weight",
)
POOL_SIZE: Final = 2_000_003


def random_weights(
    spec: ModelSpec,
    dtype: str,
    seed: int = 0,
    device: str = "cpu",
    rank_info: RankInfo = WHOLE_MODEL,
) -> Weights:
    """Returns weights drawn from N(0, initializer_range), norms 1; the same on every
    device. A rank's are its parts of the whole model's.
    """
    form = random_form(spec.quantization)
    model_parts = expected_parts(spec, form)
    rank_spec = spec if rank_info == WHOLE_MODEL else spec.for_rank(rank_info)
    weights = empty_weights(rank_spec, dtype, device)
    own_parts = rank_parts(
        rank_spec, checkpoint_parts(rank_spec, weights, form), model_parts
    )
    pool = random_pool(spec.initializer_range, dtype, seed, device)
    draw_weights(own_parts, model_parts, pool)
    layers = (finish_layer(layer, dtype) for layer in weights.layers)
    return evolve(weights, layers=tuple(layers))


def random_form(quantization: Quantization | None) -> CheckpointForm:
    """Returns the form in which random matrices are made: in full numbers, which are
    quantized as they are read.
    """
    if quantization is None:
        return PLAIN_FORM
    return CheckpointForm(OnLoad(quantization.format.scheme))


def random_pool(deviation: float, dtype: str, seed: int, device: str) -> "torch.Tensor":
    """Returns the numbers [POOL_SIZE] of which all tensors are made, from N(0,
    deviation).
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    pool = torch.empty(POOL_SIZE).normal_(0.0, deviation, generator=generator)
    return pool.to(device=device, dtype=torch_dtype(dtype))


def draw_weights(
    own_parts: Iterable[RankPart],
    model_parts: Mapping[str, WeightPart],
    pool: "torch.Tensor",
) -> None:
    """Fill a rank's tensors with their parts of the model's, drawn from the pool; norms
    are 1.
    """
    parts_by_name = {rank_part.part.name: rank_part for rank_part in own_parts}
    offset = 0
    for name, weight_part in model_parts.items():
        rank_part = parts_by_name.get(name)
        if IS_NORM.search(name) or name.endswith(ONES):
            if rank_part is not None:
                rank_part.part.target.fill_(1.0)
            continue
        drawn = _draw_target(rank_part, weight_part, pool)
        offset = _draw(pool, offset, weight_part.shape, drawn)
        if rank_part is None or drawn is None or drawn is rank_part.part.target:
            continue
        cut = rank_part.cut
        rank_part.fill(drawn if cut is None else cut.apply(drawn))


def _draw_target(
    rank_part: RankPart | None, weight_part: WeightPart, pool: "torch.Tensor"
) -> "torch.Tensor | None":
    """Returns the tensor into which a whole tensor is drawn: its target, or memory of its
    own if the target takes a part of it, another order or another form; None if it is not
    needed.
    """
    import torch

    if rank_part is None:
        return None
    part, target = rank_part.part, rank_part.part.target
    is_filled_whole = rank_part.cut is None and not rank_part.is_zero
    is_as_drawn = part.take is None and part.arrange is None and target.is_contiguous()
    if is_filled_whole and is_as_drawn:
        return target
    return torch.empty(weight_part.shape, dtype=pool.dtype, device=pool.device)


def _draw(
    pool: "torch.Tensor",
    offset: int,
    shape: tuple[int, ...],
    drawn: "torch.Tensor | None",
) -> int:
    """Draw a tensor of this shape from the pool's numbers behind `offset`; returns where
    the next one begins. None: it is only passed over.
    """
    columns = shape[-1]
    num_rows = prod(shape) // columns
    rows_at_once = max(1, POOL_SIZE // 8 // columns)
    matrix = (
        None if drawn is None else drawn.flatten(0, -2) if len(shape) > 1 else drawn[None]
    )
    for first in range(0, num_rows, rows_at_once):
        size = min(rows_at_once, num_rows - first) * columns
        if matrix is not None:
            rows = matrix[first : first + rows_at_once]
            rows.copy_(pool[offset : offset + size].view(rows.shape))
        # Reads begin anywhere in the first half, so that rows are seldom equal.
        offset = (offset + size + 1) % (POOL_SIZE // 2)
    return offset

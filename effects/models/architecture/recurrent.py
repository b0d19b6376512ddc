"""The recurrent sublayers, which keep a state of a sequence instead of its keys and
values.

This file lists their types: a new type is one more member of each union, and one more
case of each function below. A sublayer normalises the rows that it reads, unless an
attention beside it has done so, mixes them with its state, and adds a product of the
result to the residual stream.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from minfer.effects.models.architecture.gated_delta import (
    GatedDelta,
    GatedDeltaWeights,
    empty_gated_delta,
    gated_delta_parts,
    mix_gated_delta,
    read_gated_delta,
)
from minfer.effects.models.architecture.kimi_delta import (
    KimiDelta,
    KimiDeltaWeights,
    empty_kimi_delta,
    kimi_delta_parts,
    mix_kimi_delta,
    read_kimi_delta,
)
from minfer.effects.models.architecture.linear import NormRule, WeightMaker
from minfer.effects.models.architecture.mamba import (
    Mamba,
    MambaWeights,
    empty_mamba,
    mamba_parts,
    mix_mamba,
    read_mamba,
)
from minfer.effects.models.architecture.mamba2 import (
    Mamba2,
    Mamba2Weights,
    empty_mamba2,
    mamba2_parts,
    mix_mamba2,
    read_mamba2,
)
from minfer.effects.models.architecture.model_step import ModelStep
from minfer.effects.models.architecture.quantization import CheckpointForm
from minfer.effects.models.architecture.short_conv import (
    ShortConv,
    ShortConvWeights,
    empty_short_conv,
    mix_short_conv,
    read_short_conv,
    short_conv_parts,
)
from minfer.effects.models.config_reader import ConfigReader
from minfer.effects.models.families.layer_keys import Multipliers
from minfer.effects.models.families.recurrent_keys import (
    GatedDeltaKeys,
    KimiDeltaKeys,
    Mamba2Keys,
    MambaKeys,
    RecurrentKeys,
    ShortConvKeys,
)
from minfer.effects.models.parts import WeightPart
from minfer.kernels.leaves import Norm

if TYPE_CHECKING:
    from torch import Tensor

Recurrent = GatedDelta | KimiDelta | Mamba | Mamba2 | ShortConv
RecurrentWeights = (
    GatedDeltaWeights | KimiDeltaWeights | MambaWeights | Mamba2Weights | ShortConvWeights
)


def read_recurrent(
    reader: ConfigReader, keys: RecurrentKeys, norms: NormRule, multipliers: Multipliers
) -> Recurrent:
    """Returns the recurrent sublayer of a model's layers, from a config. Raises
    `ModelConfigError`, `UnsupportedModelError`.
    """
    match keys:
        case GatedDeltaKeys():
            return read_gated_delta(reader, keys, norms)
        case KimiDeltaKeys():
            return read_kimi_delta(reader, norms)
        case MambaKeys():
            return read_mamba(reader, norms)
        case Mamba2Keys():
            return read_mamba2(reader, keys, norms, multipliers)
        case ShortConvKeys():
            return read_short_conv(reader, norms)


def empty_recurrent(sizes: Recurrent, make: WeightMaker) -> RecurrentWeights:
    """Returns uninitialised weights of these sizes."""
    match sizes:
        case GatedDelta():
            return empty_gated_delta(sizes, make)
        case KimiDelta():
            return empty_kimi_delta(sizes, make)
        case Mamba():
            return empty_mamba(sizes, make)
        case Mamba2():
            return empty_mamba2(sizes, make)
        case ShortConv():
            return empty_short_conv(sizes, make)


def recurrent_parts(
    sizes: Recurrent, weights: RecurrentWeights, form: CheckpointForm
) -> Iterator[WeightPart]:
    """Yields the tensors of a layer of a checkpoint, with their targets."""
    match sizes, weights:
        case GatedDelta(), GatedDeltaWeights():
            yield from gated_delta_parts(sizes, weights, form)
        case KimiDelta(), KimiDeltaWeights():
            yield from kimi_delta_parts(sizes, weights, form)
        case Mamba(), MambaWeights():
            yield from mamba_parts(sizes, weights, form)
        case Mamba2(), Mamba2Weights():
            yield from mamba2_parts(sizes, weights, form)
        case ShortConv(), ShortConvWeights():
            yield from short_conv_parts(sizes, weights, form)


def mix_with_state(
    sizes: Recurrent,
    weights: RecurrentWeights,
    rows: "Tensor",
    norm: Norm | None,
    index: int,
    step: ModelStep,
) -> "Tensor":
    """Returns the input of the last product of layer `index` [tokens, inputs of that
    product], for rows [tokens, hidden], which are normalised first if there is `norm`;
    updates the states. Raises TypeError for weights of another type than `sizes`.
    """
    match sizes, weights:
        case GatedDelta(), GatedDeltaWeights():
            return mix_gated_delta(sizes, weights, rows, norm, index, step)
        case KimiDelta(), KimiDeltaWeights():
            return mix_kimi_delta(sizes, weights, rows, norm, index, step)
        case Mamba(), MambaWeights():
            return mix_mamba(sizes, weights, rows, norm, index, step)
        case Mamba2(), Mamba2Weights():
            return mix_mamba2(sizes, weights, rows, norm, index, step)
        case ShortConv(), ShortConvWeights():
            return mix_short_conv(weights, rows, norm, index, step)
    raise TypeError(f"layer {index}: {sizes} has {type(weights).__name__}")

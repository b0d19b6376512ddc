"""Puts an adapter into a slot of host memory, in the layout of the device's slots."""

from typing import TYPE_CHECKING

from attrs import evolve

from minfer.effects.models.adapters.adapter_parts import (
    AdapterPart,
    adapter_parts,
    layout_parts,
)
from minfer.effects.models.adapters.peft_config import AdapterError
from minfer.effects.models.adapters.peft_files import Adapter, LoraWeights
from minfer.effects.models.adapters.slot_layout import SlotLayout, SlotMemory
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.layout.rank_parts import rank_parts
from minfer.kernels.leaves import Shard

if TYPE_CHECKING:
    from torch import Tensor


def place_adapter(
    adapter: Adapter, model: ModelSpec, spec: ModelSpec, layout: SlotLayout
) -> SlotMemory:
    """Returns one slot of host memory with a rank's part of an adapter; `model` has the
    sizes of the whole model, `spec` the rank's. Raises `AdapterError` for numbers that
    are not finite in the model's dtype.
    """
    memory = SlotMemory.empty(spec, layout, 1, "cpu")
    memory.numbers.zero_()
    parts = adapter_parts(spec, memory)
    whole = {
        name: part.part
        for name, part in layout_parts(model, layout.rank).items()
        if name in adapter.matrices
    }
    for name, factors in adapter.matrices.items():
        if (part := parts.get(name)) is not None:  # else another stage has it
            _place_a(spec, part, factors)
            [rank_part] = rank_parts(spec, iter([evolve(part.part, name=name)]), whole)
            stored = _padded_b(part, factors, layout.rank)
            cut = rank_part.cut
            rank_part.fill(stored if cut is None else cut.apply(stored))
    if not memory.numbers.isfinite().all():
        raise AdapterError(
            f"{adapter.folder}: its numbers, times lora_alpha / r, are infinite in "
            f"{spec.dtype}; use another --dtype"
        )
    return memory


def _place_a(spec: ModelSpec, part: AdapterPart, factors: LoraWeights) -> None:
    """Copy A, or the rank's inputs of it, to each place of it in the slot."""
    lora_a, sizes = factors.lora_a, part.place.sizes
    rank = spec.rank_info.tensor_rank
    if part.is_stacked and len(lora_a) != sizes.experts:
        lora_a = lora_a[rank * sizes.experts : (rank + 1) * sizes.experts]
    if sizes.shard is Shard.ROW and lora_a.shape[-1] != sizes.inputs:
        lora_a = lora_a[..., rank * sizes.inputs : (rank + 1) * sizes.inputs]
    for index in part.parts:
        part.lora_a(index)[..., : factors.rank, :].copy_(lora_a)
        # Of experts, the largest of their ranks: the others are padded with zeros.
        first = part.slots.ranks[0, index]
        first.fill_(max(int(first), factors.rank))


def _padded_b(part: AdapterPart, factors: LoraWeights, rank: int) -> "Tensor":
    """Returns B times the adapter's factor, in the form of the checkpoint's matrix, with
    zeros up to the slot's rank.
    """
    scaled = factors.lora_b.float() * factors.scaling
    padded = scaled.new_zeros(*scaled.shape[:-1], rank)
    padded[..., : factors.rank] = scaled
    return padded.mT if part.is_transposed else padded

"""Which tensors of an adapter a model takes, and where they go in a slot."""

from bisect import bisect_right
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from attrs import evolve, frozen

from minfer.effects.models.adapters.slot_layout import (
    SlotLayout,
    SlotMatrix,
    SlotMemory,
    slot_layers,
)
from minfer.effects.models.architecture.layers import layer_parts
from minfer.effects.models.architecture.moe import MoE
from minfer.effects.models.architecture.quantization import CheckpointForm
from minfer.effects.models.architecture.spec import ModelSpec, layer_prefix
from minfer.effects.models.parts import WeightPart
from minfer.kernels.leaves import AdapterSlots, Shard

if TYPE_CHECKING:
    from torch import Tensor

SUFFIX: Final = ".weight"  # of matrices' names


@frozen(eq=False)
class AdapterPart:
    """A matrix of a checkpoint that an adapter can change, or those of all experts."""

    name: str  # of the checkpoint's matrix
    part: WeightPart  # its B: the target is a view into a slot, [outputs, rank]
    place: SlotMatrix
    slots: AdapterSlots
    # The A's of the slot that it is: more than one where it has several matrices that
    # other checkpoints store one by one.
    parts: range
    expert: int | None = None  # whose matrix it is; None: of no expert, or of all
    is_transposed: bool = False  # the checkpoint's tensor is [experts, in, out]

    @property
    def is_stacked(self) -> bool:
        """Whether it has the matrices of all experts."""
        return bool(self.place.sizes.experts) and self.expert is None

    @property
    def parameter(self) -> str:
        """What transformers calls the matrices of all experts."""
        if self.place.sizes.shard is Shard.ROW:
            return "down_proj"
        return "gate_up_proj" if len(self.parts) > 1 else "up_proj"

    @property
    def experts(self) -> int:
        """How many experts' matrices it has: 1 if it is none."""
        return int(self.part.target.shape[0]) if self.is_stacked else 1

    @property
    def inputs(self) -> int:
        """The size of the rows that it multiplies."""
        return self.place.sizes.inputs

    @property
    def outputs(self) -> int:
        """Its outputs."""
        return int(self.part.target.shape[-2])

    def lora_a(self, part: int) -> "Tensor":
        """Returns where an A goes: [rank, inputs], or [experts, rank, inputs]."""
        first = part * self.place.rank
        of_slot = self.slots.lora_a[0]
        if self.expert is not None:
            of_slot = of_slot[self.expert]
        return of_slot[..., first : first + self.place.rank, :]


def adapter_parts(spec: ModelSpec, memory: SlotMemory) -> dict[str, AdapterPart]:
    """Returns the matrices of a rank that an adapter can change, by their names in a
    checkpoint, the layer's number included; experts' matrices one by one, and stacked.
    """
    # Where each matrix begins: a part's target is found by its place in memory.
    places = {
        place.first_b: (place, memory.leaf(place)) for place in memory.layout.matrices
    }
    starts = sorted(places)
    found: dict[str, AdapterPart] = {}
    layers = zip(spec.layers, slot_layers(spec, memory), strict=True)
    for index, (layer, weights) in enumerate(layers, spec.first_layer):
        # Those of experts, in both forms in which checkpoints may have them.
        forms, is_transposed = [CheckpointForm(stacked=False)], False
        if isinstance(layer.feed_forward, MoE):
            forms.append(CheckpointForm(stacked=True))
            is_transposed = layer.feed_forward.keys.stored.transposed
        for form in forms:
            for part in layer_parts(layer, weights, form):
                if not part.target.is_meta:
                    named = part.with_prefix(layer_prefix(index))
                    first_b = _start(starts, int(named.target.storage_offset()))
                    adapter_part = _adapter_part(named, *places[first_b])
                    if adapter_part.is_stacked and is_transposed:
                        adapter_part = evolve(adapter_part, is_transposed=True)
                    found[adapter_part.name] = adapter_part
    return found


def _start(starts: list[int], offset: int) -> int:
    """Returns the last of the sorted starts that is not behind an offset."""
    return starts[bisect_right(starts, offset) - 1]


def _adapter_part(
    part: WeightPart, place: SlotMatrix, slots: AdapterSlots
) -> AdapterPart:
    """Returns a part of the slot of a matrix."""
    offset = int(part.target.storage_offset()) - place.first_b
    outputs = sum(place.sizes.outputs)
    expert, first = divmod(offset, place.rank * outputs)
    is_single = place.sizes.experts and part.target.dim() == 2
    return AdapterPart(
        part.name.removesuffix(SUFFIX),
        part,
        place,
        slots,
        range(*_covered(place.parts, first, int(part.target.shape[-2]))),
        expert if is_single else None,
    )


def _covered(parts: tuple[int, ...], first: int, count: int) -> tuple[int, int]:
    """Returns the first of the parts that `count` outputs from `first` on are, and the
    number behind the last. Raises ValueError if they are not whole parts.
    """
    ends, end = [0], 0
    for outputs in parts:
        end += outputs
        ends.append(end)
    return ends.index(first), ends.index(first + count)


def layout_parts(spec: ModelSpec, max_rank: int) -> Mapping[str, AdapterPart]:
    """Returns the parts of a rank without memory: for their names and shapes."""
    layout = SlotLayout.of(spec, max_rank)
    return adapter_parts(spec, SlotMemory.empty(spec, layout, 1, "cpu"))

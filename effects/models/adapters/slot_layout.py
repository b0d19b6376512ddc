"""Where the matrices of an adapter lie in a slot.

Theory. A slot is one range of memory with room for A and B of the largest rank, of every
matrix of a rank's part of the model that an adapter can change. All slots are alike, so
that the slots of a matrix are one strided tensor, and loading an adapter is one copy from
pinned memory of the host, which holds it in the same layout.

B is stored as a matrix's outputs are: rearranged, scaled, and divided among ranks as the
outputs of W are, since W + B @ A has the outputs of B. So an adapter's B is loaded by the
parts (parts.py) of a tree of weights whose matrices are [outputs, rank]. Of A, ranks that
divide a matrix by its inputs have some of the inputs.
"""

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve, field, fields, frozen, has

from minfer.effects.models.architecture.layers import LayerWeights, empty_layer
from minfer.effects.models.architecture.linear import LinearSizes, WeightMaker
from minfer.effects.models.architecture.spec import ModelSpec, layer_prefix
from minfer.effects.models.architecture.weights import Weights
from minfer.effects.models.dtypes import dtype_bytes, torch_dtype
from minfer.kernels.leaves import AdapterSlots, Linear, Norm

if TYPE_CHECKING:
    import torch
    from torch import Tensor

RANK_STEP: Final = 16  # of tensor cores: slots have room for a multiple of it
ALIGNED_ELEMENTS: Final = 64
# MLA multiplies queries with it in one place and latents in another.
UNCHANGED: Final = ("self_attn.kv_b_proj",)


@frozen
class SlotMatrix:
    """The place of a matrix's A and B in a slot, in elements."""

    sizes: LinearSizes  # with whole names
    first_a: int
    first_b: int
    first_part: int  # of the slot's ranks
    rank: int

    @property
    def shape_a(self) -> tuple[int, ...]:
        """[parts * rank, inputs], of experts with a dimension of them before."""
        return (*self._experts, len(self.parts) * self.rank, self.sizes.inputs)

    @property
    def shape_b(self) -> tuple[int, ...]:
        """[rank, outputs], of experts with a dimension of them before."""
        return (*self._experts, self.rank, sum(self.sizes.outputs))

    @property
    def parts(self) -> tuple[int, ...]:
        """Outputs of each matrix that has an A of its own."""
        return tuple(sum(outputs) for _, outputs in self.sizes.stored)

    @property
    def _experts(self) -> tuple[int, ...]:
        return (self.sizes.experts,) if self.sizes.experts else ()


@frozen
class SlotLayout:
    """The places of all matrices in a slot."""

    matrices: tuple[SlotMatrix, ...]
    elements: int
    parts: int  # ranks in a slot: of each A
    rank: int

    @classmethod
    def of(cls, spec: ModelSpec, max_rank: int) -> "SlotLayout":
        """Returns the layout of a rank's slots, for adapters of up to `max_rank`."""
        rank = -(-max_rank // RANK_STEP) * RANK_STEP
        places: list[SlotMatrix] = []
        first = part = 0
        for sizes in _sizes(spec):
            place = SlotMatrix(sizes, first, 0, part, rank)
            place = evolve(place, first_b=first + _aligned(place.shape_a))
            places.append(place)
            first = place.first_b + _aligned(place.shape_b)
            part += len(place.parts)
        return cls(tuple(places), first, part, rank)


def slot_bytes(spec: ModelSpec, max_rank: int) -> int:
    """Returns the bytes that a slot of a rank takes; `spec` has the rank's sizes."""
    layout = SlotLayout.of(spec, max_rank)
    return layout.elements * dtype_bytes(spec.dtype) + layout.parts * 4


def _sizes(spec: ModelSpec) -> Iterator[LinearSizes]:
    """Yields the matrices that adapters can change. Of a model that transformers runs,
    there are none.
    """
    if spec.parameters:
        return
    for sizes in spec.matrices:
        if not sizes.names[0].endswith(UNCHANGED):
            yield sizes


def _aligned(shape: tuple[int, ...]) -> int:
    return -(-prod(shape) // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS


@frozen(eq=False)
class SlotMemory:
    """The slots of a device, or one slot of the host."""

    layout: SlotLayout
    numbers: "Tensor"  # [slots, elements]
    ranks: "Tensor"  # [slots, parts] int32

    @classmethod
    def empty(
        cls, spec: ModelSpec, layout: SlotLayout, slots: int, device: "torch.device | str"
    ) -> "SlotMemory":
        """Returns slots without adapters. Raises RuntimeError (torch.OutOfMemoryError) if
        they do not fit.
        """
        import torch

        return cls(
            layout,
            torch.empty(
                slots, layout.elements, dtype=torch_dtype(spec.dtype), device=device
            ),
            torch.zeros(slots, layout.parts, dtype=torch.int32, device=device),
        )

    def leaf(self, place: SlotMatrix) -> AdapterSlots:
        """Returns the slots of a matrix."""
        return AdapterSlots(
            lora_a=self._view(place.shape_a, place.first_a),
            lora_b=self._view(place.shape_b, place.first_b),
            ranks=self.ranks[:, place.first_part : place.first_part + len(place.parts)],
            parts=place.parts,
        )

    def _view(self, shape: tuple[int, ...], first: int) -> "Tensor":
        numbers = self.numbers[:, first : first + prod(shape)]
        return numbers.view(len(numbers), *shape)


@frozen
class SlotMaker(WeightMaker):
    """Makes a tree of weights in which a matrix is a slot's B, [outputs, rank], and has
    the slots of the matrix; other tensors have no memory.
    """

    slots: dict[str, AdapterSlots] = field(factory=dict, kw_only=True)  # by first name

    def linear(self, sizes: LinearSizes) -> Linear:
        """Returns a matrix with its slots."""
        slots = self.slots.get(self.prefix + sizes.names[0])
        if slots is None:
            return evolve(super().linear(sizes), bias=None)
        return Linear(
            weight=slots.lora_b[0].mT,
            shard=sizes.shard,
            parts=sizes.outputs,
            adapters=slots,
        )


def slot_layers(spec: ModelSpec, memory: SlotMemory) -> tuple[LayerWeights, ...]:
    """Returns the trees of the layers of a rank, as `SlotMaker` makes them."""
    slots = {place.sizes.names[0]: memory.leaf(place) for place in memory.layout.matrices}
    make = SlotMaker(spec.dtype, "meta", slots=slots)
    return tuple(
        empty_layer(layer, evolve(make, prefix=layer_prefix(i)))
        for i, layer in enumerate(spec.layers, spec.first_layer)
    )


def with_slots(spec: ModelSpec, weights: Weights, memory: SlotMemory) -> Weights:
    """Returns a rank's weights, whose matrices have slots of adapters."""
    layers = zip(weights.layers, slot_layers(spec, memory), strict=True)
    return evolve(weights, layers=tuple(_with_slots(*layer) for layer in layers))


def _with_slots(node: Any, slots: Any) -> Any:
    """Returns a part of a layer's weights with the slots of another tree."""
    if isinstance(node, Linear):
        return evolve(node, adapters=slots.adapters)
    if not has(type(node)) or isinstance(node, Norm) or slots is None:
        return node
    return evolve(
        node,
        **{
            attribute.name: _with_slots(
                getattr(node, attribute.name), getattr(slots, attribute.name)
            )
            for attribute in fields(type(node))
        },
    )

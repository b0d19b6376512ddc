"""Quantized matrices of a model of transformers.

transformers makes the model and loads the rest of it. In the place of a module of type
`torch.nn.Linear` whose matrix a checkpoint stores quantized, the model has one that holds
minfer's leaf, read as those of minfer's own models are, and multiplied by the same
kernels. It has no parameters, so to transformers the leaf's tensors are unexpected ones.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import evolve, frozen
from torch import Tensor, nn

from minfer.effects.models.architecture.products import linear, prepared
from minfer.effects.models.architecture.quantization import Files
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.weights import empty_leaves, leaf_parts
from minfer.effects.models.checkpoint.checkpoint import files_of, planned_parts
from minfer.effects.models.checkpoint.weight_files import FoundTensors
from minfer.effects.models.formats.on_load import OnLoad
from minfer.kernels.leaves import Linear


class QuantizedLinear(nn.Module):
    """A module that multiplies with a leaf, in the place of a `torch.nn.Linear`."""

    def __init__(self, leaf: Linear) -> None:
        super().__init__()
        self.leaf = leaf

    def forward(self, x: Tensor) -> Tensor:
        """Returns x @ weight.T + bias: [..., inputs] -> [..., outputs]."""
        made = linear(x.flatten(0, -2), self.leaf)
        return made.view(*x.shape[:-1], made.shape[-1])

    def _apply(self, change: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Change all tensors, as moves to another device do."""
        del recurse
        leaf, rest = self.leaf, (self.leaf.bias, self.leaf.scales, self.leaf.zeros)
        bias, scales, zeros = (None if one is None else change(one) for one in rest)
        self.leaf = evolve(
            leaf, weight=change(leaf.weight), bias=bias, scales=scales, zeros=zeros
        )
        return self


@frozen(eq=False)
class StoredLeaves:
    """The quantized matrices of a checkpoint."""

    leaves: Mapping[str, Linear]  # by their modules' names
    tensors: frozenset[str]  # theirs, by their names in the files and in the model
    inert: tuple[str, ...]  # how names of further ones end, which are not read

    def has(self, name: str) -> bool:
        """Returns whether a tensor of the files belongs to quantized matrices."""
        return name in self.tensors or name.endswith(self.inert)

    def in_class(self, kind: Any) -> Any:
        """Returns a class of transformers whose models have the leaves."""

        if not self.leaves:
            return kind

        def init(model: Any, *given: Any, **how: Any) -> None:
            kind.__init__(model, *given, **how)
            _put(self.leaves, model)

        # transformers looks for the source of a class in its module.
        changes = {"__init__": init, "__module__": kind.__module__}
        return type(kind.__name__, (kind,), changes)


def read_leaves(spec: ModelSpec, found: FoundTensors, folder: Path) -> StoredLeaves:
    """Returns the quantized matrices of a checkpoint. Raises `CheckpointError`."""
    how = spec.quantization
    if how is None:
        return StoredLeaves({}, frozenset(), ())
    leaves = empty_leaves(spec)
    places = {part.name: place for place, part in planned_parts(spec, found, folder)}
    for part in leaf_parts(leaves, files_of(spec, found)):
        if part.name in places:  # else it is optional
            part.fill(places[part.name].tensor())
    tensors = {*places, *(place.name for place in places.values())}
    return StoredLeaves(leaves, frozenset(tensors), how.format.inert)


def quantize_modules(spec: ModelSpec, model: Any) -> None:
    """Quantize matrices of a model, as those of a checkpoint would be."""
    if spec.quantization is None:
        return
    leaves = empty_leaves(spec)
    for part in leaf_parts(leaves, Files(OnLoad(spec.quantization.format.scheme))):
        part.fill(model.get_parameter(part.name))
    _put(leaves, model)


def _put(leaves: Mapping[str, Linear], model: Any) -> None:
    for name, leaf in leaves.items():
        model.set_submodule(name, QuantizedLinear(leaf))


def prepare_leaves(model: Any) -> None:
    """Store the leaves of a model, on its device, as their kernels do."""
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.leaf = prepared(module.leaf)


def without_rounding(leaf: Linear) -> Linear:
    """Returns a leaf whose products do not round activations: where they do, tiny
    differences between two ways of computing a model grow with each layer.
    """
    return evolve(leaf, scheme=evolve(leaf.scheme, activations="as they are"))

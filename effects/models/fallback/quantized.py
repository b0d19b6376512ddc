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

from minfer.effects.models.architecture.product_context import ProductContext
from minfer.effects.models.architecture.products import in_kernel_layout, linear
from minfer.effects.models.architecture.quantization import CheckpointForm
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.weights import empty_leaves, leaf_parts
from minfer.effects.models.checkpoint.checkpoint import checkpoint_form, planned_parts
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
        product = linear(x.flatten(0, -2), self.leaf, ProductContext(x.is_cuda))
        return product.view(*x.shape[:-1], product.shape[-1])

    def _apply(self, change: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Change all tensors, as moves to another device do."""
        del recurse
        leaf = self.leaf
        optional = (leaf.bias, leaf.scales, leaf.zeros, leaf.factors, leaf.blocks)
        bias, scales, zeros, factors, blocks = (
            None if tensor is None else change(tensor) for tensor in optional
        )
        self.leaf = evolve(
            leaf,
            weight=change(leaf.weight),
            bias=bias,
            scales=scales,
            zeros=zeros,
            factors=factors,
            blocks=blocks,
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

    def in_class(self, model_class: Any) -> Any:
        """Returns a class of transformers whose models have the leaves."""

        if not self.leaves:
            return model_class

        def init(model: Any, *args: Any, **kwargs: Any) -> None:
            model_class.__init__(model, *args, **kwargs)
            _put(self.leaves, model)

        # transformers looks for the source of a class in its module.
        changes = {"__init__": init, "__module__": model_class.__module__}
        return type(model_class.__name__, (model_class,), changes)


def read_leaves(
    spec: ModelSpec, found_tensors: FoundTensors, folder: Path
) -> StoredLeaves:
    """Returns the quantized matrices of a checkpoint. Raises `CheckpointError`."""
    quantization = spec.quantization
    if quantization is None:
        return StoredLeaves({}, frozenset(), ())
    leaves = empty_leaves(spec)
    places = {
        weight_part.name: place
        for place, weight_part in planned_parts(spec, found_tensors, folder)
    }
    for weight_part in leaf_parts(leaves, checkpoint_form(spec, found_tensors)):
        if weight_part.name in places:  # else it is optional
            weight_part.fill(places[weight_part.name].tensor())
    tensors = {*places, *(place.name for place in places.values())}
    return StoredLeaves(leaves, frozenset(tensors), quantization.format.inert)


def quantize_modules(spec: ModelSpec, model: Any) -> None:
    """Quantize matrices of a model, as those of a checkpoint would be."""
    if spec.quantization is None:
        return
    leaves = empty_leaves(spec)
    for weight_part in leaf_parts(
        leaves, CheckpointForm(OnLoad(spec.quantization.format.scheme))
    ):
        weight_part.fill(model.get_parameter(weight_part.name))
    _put(leaves, model)


def _put(leaves: Mapping[str, Linear], model: Any) -> None:
    for name, leaf in leaves.items():
        model.set_submodule(name, QuantizedLinear(leaf))


def prepare_leaves(model: Any) -> None:
    """Store the leaves of a model, on its device, as their kernels do."""
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.leaf = in_kernel_layout(module.leaf)


def without_rounding(leaf: Linear) -> Linear:
    """Returns a leaf whose products do not round activations: where they do, tiny
    differences between two ways of computing a model grow with each layer.
    """
    return evolve(leaf, scheme=evolve(leaf.scheme, activations="as they are"))

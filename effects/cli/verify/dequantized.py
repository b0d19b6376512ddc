"""A quantized checkpoint, or a GGUF file, as the unquantized checkpoint that it means.

transformers needs further packages for most formats, and rounds activations otherwise in
others. So the reference is its model on dequantized matrices, in float32; all else is
copied. Where a scheme rounds activations, rounded.py makes the reference round them.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import torch
from attrs import evolve, frozen
from torch import Tensor

from minfer.effects.models.architecture.linear import LinearSizes, WeightMaker
from minfer.effects.models.architecture.moe import MoE
from minfer.effects.models.architecture.quantization import CheckpointForm
from minfer.effects.models.architecture.quantization_files import FILE, KEY, METHODS
from minfer.effects.models.architecture.spec import ModelSpec, layer_prefix
from minfer.effects.models.checkpoint.checkpoint import (
    checkpoint_form,
    planned_parts,
    read_config,
)
from minfer.effects.models.checkpoint.weight_files import (
    SINGLE_NAME,
    SUFFIX,
    WEIGHTS_FILE_KEY,
    TensorPlace,
    find_tensors,
)
from minfer.effects.models.checkpoint.write_safetensors import size_of, write_file
from minfer.effects.models.parts import WeightPart
from minfer.kernels.leaves import Linear, Scheme
from minfer.kernels.quantized import dequantize

WEIGHT: Final = ".weight"
NOT_COPIED: Final = {"config.json", *METHODS}


@frozen
class StoredMatrix:
    """A quantized matrix of a checkpoint, or those of all experts of a layer in one."""

    name: str  # in the model
    sizes: LinearSizes
    transposed: bool = False  # an unquantized checkpoint has [experts, inputs, outputs]

    @property
    def end(self) -> str:
        """How its name ends in an unquantized checkpoint."""
        return "" if self.sizes.experts else WEIGHT

    def blank(self) -> Tensor:
        """Returns a tensor of its shape there, without data."""
        rows, columns = sum(self.sizes.outputs), self.sizes.inputs
        shape = (columns, rows) if self.transposed else (rows, columns)
        count = (self.sizes.experts,) if self.sizes.experts else ()
        return torch.empty((*count, *shape), device="meta")


@frozen(eq=False)
class Dequantized:
    """A checkpoint without quantization."""

    folder: Path
    # How the products with some parameters round activations, and which; None: none do.
    scheme: Scheme | None
    rounded: frozenset[str]
    quantized: frozenset[str] = frozenset()  # tensors, by their names in the folder


@frozen(eq=False)
class SourceTensors:
    """The tensors of a checkpoint that is to be dequantized."""

    spec: ModelSpec
    files: CheckpointForm
    places: Mapping[str, TensorPlace]  # by the model's names

    def parts(self, matrix: StoredMatrix, leaf: Linear) -> list[WeightPart]:
        """Returns the tensors of a quantized matrix that the checkpoint has."""
        form = self.files.format_of(matrix.name)
        read = form.expert_parts if matrix.sizes.experts else form.parts
        return [
            tensor_part
            for tensor_part in read(matrix.name, leaf)
            if tensor_part.name in self.places
        ]

    def leaf(self, matrix: StoredMatrix) -> Linear:
        """Returns the leaf of a quantized matrix, not filled."""
        quantization = self.spec.quantization
        quantization = (
            None if quantization is None else evolve(quantization, plain=frozenset())
        )
        sizes = evolve(matrix.sizes, bias=False, plain=False)
        return WeightMaker("float32", "cpu", quantization).linear(sizes)

    def names(self, matrix: StoredMatrix) -> list[str]:
        """Returns the names of a quantized matrix's tensors in the files."""
        tensor_parts = self.parts(matrix, self.leaf(matrix))
        return [self.places[tensor_part.name].name for tensor_part in tensor_parts]

    def unquantized_name(self, matrix: StoredMatrix) -> str:
        """Returns a matrix's name in an unquantized checkpoint, with the prefix that the
        files' names have.
        """
        first = self.parts(matrix, self.leaf(matrix))[0].name
        end = first.removeprefix(matrix.name)
        return self.places[first].name.removesuffix(end) + matrix.end

    def meant(self, matrix: StoredMatrix) -> Tensor:
        """Returns the numbers that a quantized matrix means, in float32."""
        leaf = self.leaf(matrix)
        for tensor_part in self.parts(matrix, leaf):
            tensor_part.fill(self.places[tensor_part.name].tensor())
        numbers = dequantize(leaf)
        return (numbers.mT if matrix.transposed else numbers).contiguous()


def write_dequantized(source: Path, spec: ModelSpec, folder: Path) -> Dequantized:
    """Write what a checkpoint means to a new folder; `spec` knows which matrices are
    quantized. Raises `CheckpointError`.
    """
    folder.mkdir()
    _write_side_files(source, folder)
    with ExitStack() as stack:
        stored_tensors = find_tensors(source, stack)
        planned = planned_parts(spec, stored_tensors, source)
        places = {tensor_part.name: place for place, tensor_part in planned}
        tensors = SourceTensors(spec, checkpoint_form(spec, stored_tensors), places)
        matrices = [*_quantized(spec, tensors.files)]
        form = tensors.files.format
        stored = {name for matrix in matrices for name in tensors.names(matrix)}
        inert = () if form is None else form.inert
        unquantized = [
            place
            for name, place in stored_tensors.places.items()
            if name not in stored and not name.endswith(inert)
        ]
        names = {matrix.name: tensors.unquantized_name(matrix) for matrix in matrices}

        def written() -> Iterator[tuple[str, Tensor]]:
            for place in unquantized:
                yield place.name, place.tensor()
            for matrix in matrices:
                yield names[matrix.name], tensors.meant(matrix)

        sizes = [size_of(place.name, place.tensor()) for place in unquantized]
        sizes += [size_of(names[matrix.name], matrix.blank()) for matrix in matrices]
        write_file(folder / SINGLE_NAME, sizes, written(), lambda _: None)
    scheme = None if form is None else form.scheme
    if scheme is not None and scheme.activations == "as they are":
        scheme = None
    rounded = (matrix for matrix in matrices if not matrix.sizes.plain)
    return Dequantized(
        folder,
        scheme,
        rounded=frozenset(matrix.name + matrix.end for matrix in rounded),
        quantized=frozenset(names.values()),
    )


def _write_side_files(source: Path, folder: Path) -> None:
    """Write the config, without its quantization, and copy what is no weights."""
    config = read_config(source)
    for key in (KEY, FILE, WEIGHTS_FILE_KEY):
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for path in source.iterdir() if source.is_dir() else ():
        weights = path.suffix == SUFFIX or path.name.endswith(".index.json")
        if path.is_file() and not weights and path.name not in NOT_COPIED:
            shutil.copyfile(path, folder / path.name)


def _quantized(spec: ModelSpec, files: CheckpointForm) -> Iterator[StoredMatrix]:
    """Yields the quantized matrices of a model."""
    if spec.quantization is None:
        return
    if spec.parameters:
        for sizes in spec.linears:
            if not spec.scheme_of(sizes).is_plain:
                yield StoredMatrix(sizes.names[0], sizes)
        return
    for i, layer in enumerate(spec.layers):
        prefix = layer_prefix(i)
        for sizes in layer.matrices:
            if spec.quantization.scheme_of(prefix + sizes.names[0]).is_plain:
                continue
            feed = layer.feed_forward
            if sizes.experts and isinstance(feed, MoE):
                for matrix in _of_experts(sizes, feed, files):
                    yield evolve(matrix, name=prefix + matrix.name)
                continue
            for name, outputs in sizes.stored:
                yield StoredMatrix(
                    prefix + name, evolve(sizes, names=(name,), outputs=outputs)
                )


def _of_experts(
    sizes: LinearSizes, feed: MoE, files: CheckpointForm
) -> Iterator[StoredMatrix]:
    """Yields the matrices of experts, one by one or all in one."""
    stored = feed.keys.stored
    if stored.stacked if files.stacked is None else files.stacked:
        up = "gate_up_proj" if feed.gated else "up_proj"
        name = "down_proj" if sizes == feed.down else up
        rows = (sum(sizes.outputs),)
        stacked = evolve(sizes, names=(name,), outputs=rows, bias=False)
        transposed = stored.transposed or (stored.maybe_transposed and files.transposed)
        yield StoredMatrix(f"{stored.experts}.{name}", stacked, transposed)
        return
    for expert in range(sizes.experts):
        for name, outputs in zip(sizes.names, sizes.outputs, strict=True):
            expert_name = name.replace(
                f"{stored.experts}.0.", f"{stored.experts}.{expert}."
            )
            single = evolve(sizes, names=(expert_name,), outputs=(outputs,), experts=0)
            yield StoredMatrix(expert_name, single)

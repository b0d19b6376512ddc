"""Which matrices a checkpoint's files leave unquantized, before any is loaded.

Of a quantized checkpoint, the names of its tensors decide, as lists of exceptions in
configs are read in several ways by those who write them. Of one that is quantized to INT8
as it is loaded, a rule decides: rounding a row of activations to 8 bits takes its largest
for 127, so where a few channels are many times larger than the rest (Dettmers et al.
2022), the rest is rounded to little. A normalised row has its norm's factors as sizes of
its channels, so a matrix that reads a norm whose largest factor is more than
`MAX_NORM_RATIO` times the median one stays as it is. FP8 has an exponent, and needs no
such rule.
"""

import json
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from attrs import evolve

from minfer.effects.models.architecture.layers import Sublayer
from minfer.effects.models.architecture.linear import LinearSizes, WeightMaker
from minfer.effects.models.architecture.mla import MLA
from minfer.effects.models.architecture.quantization import Quantization
from minfer.effects.models.architecture.spec import ModelSpec, layer_prefix
from minfer.effects.models.checkpoint.tensor_names import model_names
from minfer.effects.models.checkpoint.weight_files import shards
from minfer.effects.models.config_reader import CheckpointError, UnsupportedModelError
from minfer.effects.models.gguf.container import is_gguf, read_gguf
from minfer.effects.models.gguf.tensors import GgufTensors
from minfer.kernels.leaves import INT8, Shard

MAX_NORM_RATIO: Final = 8.0
HEADER_LENGTH: Final = 8  # bytes of a file's first field


def as_stored(spec: ModelSpec, folder: Path) -> ModelSpec:
    """Returns a spec whose quantization leaves out the matrices that the files of a
    checkpoint leave out, or the rule does. Files that cannot be read change nothing: the
    loader reports them. Raises `UnsupportedModelError` for matrices that cannot be
    stored so.
    """
    quantization = spec.quantization
    if quantization is None:
        return spec
    plain, stored_names = frozenset[str](), set[str]()
    with suppress(CheckpointError, OSError, ValueError, RecursionError):
        if not quantization.at_load:
            stored_names = _stored_names(spec, quantization, folder)
            names = unquantized(_matrices(spec), quantization, stored_names)
            plain = frozenset(names)
        elif quantization.format.scheme is INT8:
            plain = frozenset(_with_outliers(spec, folder))
    if spec.parameters:
        _refuse_other_modules(spec, quantization, stored_names, folder)
    maker = WeightMaker(
        spec.dtype, "meta", quantization := evolve(quantization, plain=plain)
    )
    for sizes in spec.matrices:
        maker.scheme(sizes)
    return evolve(spec, quantization=quantization)


def _matrices(spec: ModelSpec) -> Iterator[str]:
    """Yields the names of all matrices; of experts, those of the first one."""
    for sizes in spec.matrices:
        yield from sizes.names


def _stored_names(spec: ModelSpec, quantization: Quantization, folder: Path) -> set[str]:
    """Returns the model's names of a quantized checkpoint's tensors."""
    suffixes = (".weight", *quantization.format.markers)
    names = {name + suffix for name in _matrices(spec) for suffix in suffixes}
    return {name for name, _ in model_names(spec, _places(folder), names)}


def unquantized(
    matrices: Iterable[str], quantization: Quantization, stored_names: Collection[str]
) -> Iterator[str]:
    """Yields the matrices that are there, without the tensors of quantized ones."""
    for name in matrices:
        is_quantized = any(
            name + marker in stored_names for marker in quantization.format.markers
        )
        if name + ".weight" in stored_names and not is_quantized:
            yield name


def _refuse_other_modules(
    spec: ModelSpec, quantization: Quantization, stored_names: set[str], folder: Path
) -> None:
    """Refuse quantized modules of a model that transformers runs, other than linear ones.
    Raises `UnsupportedModelError`.
    """
    linear = {*_matrices(spec)}
    for name in sorted(stored_names):
        for marker in quantization.format.markers:
            module = name.removesuffix(marker)
            if module not in {name, *linear}:
                raise UnsupportedModelError(
                    f"{folder}: module {module} is quantized "
                    f"({quantization.format.text}, tensor {name}), but "
                    f"{spec.family.architecture}, which transformers' own model "
                    f"runs, has no torch.nn.Linear of that name beside its output head; "
                    f"use a checkpoint in which it is not quantized"
                )


def _with_outliers(spec: ModelSpec, folder: Path) -> Iterator[str]:
    """Yields the matrices that read norms with outliers."""
    matrices_by_norm: dict[str, tuple[LinearSizes, ...]] = {}
    for i, layer in enumerate(spec.layers):
        name = ""
        for sublayer in layer.sublayers:
            # Without a norm of its own, it reads that of the sublayer before it.
            if sublayer.norms.before:
                name = f"{layer_prefix(i)}{sublayer.norms.before_name}.weight"
                matrices_by_norm[name] = ()
            if name:
                matrices_by_norm[name] += _input_matrices(sublayer)
    for name, path in model_names(spec, _places(folder), {*matrices_by_norm}):
        if name not in matrices_by_norm or _outlier_ratio(spec, *path) <= MAX_NORM_RATIO:
            continue
        prefix = name[: name.rindex(".", 0, -len(".weight")) + 1]
        for sizes in matrices_by_norm[name]:
            yield from (prefix + matrix_name for matrix_name in sizes.names)


def _input_matrices(sublayer: Sublayer) -> tuple[LinearSizes, ...]:
    """Returns the matrices that multiply the normalised input of a sublayer."""
    if isinstance(sublayer, MLA):
        return sublayer.matrices[:1]
    column = (sizes for sizes in sublayer.matrices if sizes.shard is Shard.COLUMN)
    return tuple(column)


def _outlier_ratio(spec: ModelSpec, path: Path, name: str) -> float:
    """Returns how many times the median factor of a norm the largest is. Raises
    ValueError for a file that is damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        if is_gguf(path):
            stored = GgufTensors(read_gguf(path)).get_tensor(name)
        else:
            with safe_open(path, framework="pt", device="cpu") as file:
                stored = file.get_tensor(name)
    except SafetensorError as error:
        raise ValueError(f"{path}: {error}") from error
    sizes = (stored.float() + spec.norms.offset).abs()
    if not len(sizes.flatten()):
        raise ValueError(f"{path}: {name} is empty")
    return float(sizes.max() / sizes.median().clamp(min=1e-30))


def stored_tensor_names(folder: Path) -> list[str]:
    """Returns the names of a checkpoint's tensors; none if its files cannot be read."""
    with suppress(CheckpointError, OSError, ValueError, RecursionError):
        return [name for name, _ in _places(folder)]
    return []


def _places(folder: Path) -> Iterator[tuple[str, tuple[Path, str]]]:
    """Yields the names of a checkpoint's tensors, and where they are."""
    for path, names in shards(folder):
        for name in _header(path) if names is None else names:
            yield name, (path, name)


def _header(path: Path) -> list[str]:
    """Returns the names of a file's tensors."""
    if is_gguf(path):
        return GgufTensors(read_gguf(path)).keys()
    with path.open("rb") as file:
        length = int.from_bytes(file.read(HEADER_LENGTH), "little")
        if length > path.stat().st_size:
            return []
        header: Any = json.loads(file.read(length))
    if not isinstance(header, dict):
        return []
    return [name for name in header if name != "__metadata__"]

"""Quantizes a checkpoint into another folder, as the loader does in memory.

The plan of the loader decides which matrices are quantized, and its function `quantize`
quantizes them. One tensor at a time is read, quantized and written. The folder is made
under a temporary name, and renamed when it is complete.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve, frozen

from minfer.effects.models.architecture.quantization import (
    LEVELS,
    Quantization,
    requested,
)
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.checkpoint.checkpoint import (
    CheckpointError,
    planned_parts,
    read_config,
)
from minfer.effects.models.checkpoint.stored_matrices import as_stored
from minfer.effects.models.checkpoint.weight_files import (
    INDEX_NAME,
    SINGLE_NAME,
    SUFFIX,
    WEIGHTS_FILE_KEY,
    FoundTensors,
    TensorPlace,
    find_tensors,
)
from minfer.effects.models.checkpoint.write_safetensors import (
    TORCH_NAMES,
    TensorSize,
    size_of,
    write_file,
)
from minfer.effects.models.config_reader import UnknownModelError, UnsupportedModelError
from minfer.effects.models.families.table import FAMILIES
from minfer.effects.models.formats.write_compressed_tensors import (
    CONFIGS,
    quantization_config,
    tensors_of,
)
from minfer.effects.models.progress import weights_bar
from minfer.kernels.leaves import PLAIN, Scheme
from minfer.values.checks import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

# The levels of --quantization that compressed-tensors can store.
WRITABLE: Final[Mapping[str, Scheme]] = {
    level: scheme for level, scheme in LEVELS.items() if scheme in CONFIGS
}
MAX_SHARD_BYTES: Final = (
    5_000_000_000  # bytes of a file, at most, unless a single tensor has more
)
CONFIG: Final = "config.json"
WEIGHT: Final = ".weight"
# Never quantized: not linear, or named by `quantization_config`.
UNQUANTIZED_SUFFIXES: Final = ("embed_tokens.weight", "lm_head.weight")
# Files of weights, in any format: they are not copied.
WEIGHT_FILES: Final = (
    *(SUFFIX, ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx"),
    ".index.json",
)
TEMPLATES: Final = "additional_chat_templates"  # the only folder that is copied


class OutputError(ConfigError):
    """The folder cannot be written. The message names the cause and the remedy."""


@frozen(eq=False)
class QuantizeJob:
    """A tensor of the source, and the tensors that are written for it."""

    place: TensorPlace
    scheme: Scheme  # plain: it is copied
    sizes: tuple[TensorSize, ...]  # of those written

    @property
    def bytes(self) -> int:
        """Returns the bytes of the written tensors."""
        return sum(size.bytes for size in self.sizes)


def quantize_checkpoint(source: Path, level: str, output: Path) -> None:
    """Write the checkpoint in folder `source` to the folder `output`, its matrices
    quantized as the level's name says, in the format of compressed-tensors.

    Raises `CheckpointError` for a source that cannot be read or is quantized already,
    ConfigError for a level that cannot be written, and `OutputError`.
    """
    if level in LEVELS and level not in WRITABLE:
        raise ConfigError(
            f"quantization {level!r} cannot be written, as minfer reads no "
            f"compressed-tensors checkpoints with it; choose one of "
            f"{', '.join(WRITABLE)}, or load the checkpoint with --quantization {level}"
        )
    if level not in WRITABLE:
        raise ConfigError(f"quantization {level!r} must be one of {', '.join(WRITABLE)}")
    _check_absent(output)
    if source.is_file():
        raise CheckpointError(
            f"{source}: is a file (GGUF); give the folder of a Hugging Face checkpoint, "
            "with config.json and safetensors"
        )
    config = read_config(source)
    spec = _spec(config, source, level)
    with ExitStack() as stack:
        found_tensors = find_tensors(source, stack)
        jobs = _jobs(spec, found_tensors, source)
        sides = [*_side_files(source)]
        config = {key: value for key, value in config.items() if key != WEIGHTS_FILE_KEY}
        ignore = _unquantized(spec, jobs)
        config["quantization_config"] = quantization_config(WRITABLE[level], ignore)
        try:
            _write(source, output, config, jobs, sides)
        except OSError as error:
            raise OutputError(
                f"{error.filename or output}: {error.strerror or error}; no partial "
                f"output is left in {output}: choose another folder, or make space"
            ) from error


def _check_absent(output: Path) -> None:
    """Refuse a folder that has contents, and one that cannot be replaced."""
    if output.is_mount():
        raise OutputError(f"{output}: is a mount point; name a folder inside it")
    try:
        if output.is_dir() and not any(output.iterdir()):
            return
        if not output.exists() and not output.is_symlink():
            return
    except OSError as error:
        raise OutputError(f"{output}: {error.strerror}; choose another folder") from error
    raise OutputError(
        f"{output}: exists already and is not an empty folder; remove it, or choose "
        f"another name"
    )


def _spec(config: Mapping[str, Any], source: Path, level: str) -> ModelSpec:
    """Returns the spec of a source that is loaded with `--quantization`."""
    path = str(source / CONFIG)
    try:
        spec = parse_spec(config, path)
    except UnknownModelError as error:
        raise UnsupportedModelError(
            f"{path}: model_type {config.get('model_type')!r} cannot be quantized; "
            f"{', '.join(FAMILIES)} can be"
        ) from error
    if spec.quantization is not None:
        raise UnsupportedModelError(
            f"{path}: the checkpoint is quantized already "
            f"({spec.quantization.format.text}); use an unquantized one"
        )
    quantization: Quantization | None = requested(level, None)
    return as_stored(evolve(spec, quantization=quantization), source)


def _jobs(
    spec: ModelSpec, found_tensors: FoundTensors, source: Path
) -> list[QuantizeJob]:
    """Returns a job for each tensor of the source, in the order of its files."""
    import torch

    schemes: dict[str, Scheme] = {}
    read_names = set[str]()
    for place, weight_part in planned_parts(spec, found_tensors, source):
        read_names.add(place.name)
        if weight_part.take is None or spec.quantization is None:
            continue
        if len(weight_part.shape) != 2:
            raise UnsupportedModelError(
                f"{place.path}: tensor {place.name} has the matrices of all experts, "
                f"which compressed-tensors does not store in one tensor; quantize the "
                f"checkpoint as it is loaded, with --quantization, or use one with a "
                f"tensor for each expert"
            )
        schemes[place.name] = spec.quantization.format.scheme
    jobs = []
    for name, place in found_tensors.places.items():
        if name not in read_names and not found_tensors.is_listed(name):
            continue  # left out by the index: the loader does not read it either
        header, scheme = place.file.get_slice(name), schemes.get(name, PLAIN)
        kind = TORCH_NAMES.get(header.get_dtype())
        if kind is None:
            fault = f"{place.path}: tensor {name} has type {header.get_dtype()}"
            supported = ", ".join(TORCH_NAMES)
            raise UnsupportedModelError(
                f"{fault}, which cannot be copied; {supported} can be"
            )
        blank = torch.empty(header.get_shape(), dtype=getattr(torch, kind), device="meta")
        tensors = _tensors_to_write(place, scheme, blank)
        sizes = tuple(size_of(*named) for named in tensors.items())
        jobs.append(QuantizeJob(place, scheme, sizes))
    return jobs


def _tensors_to_write(
    place: TensorPlace, scheme: Scheme, tensor: "Tensor"
) -> "dict[str, Tensor]":
    """Returns the tensors that are written for one, by their names."""
    from minfer.kernels.quantized import quantize

    if scheme.is_plain:
        return {place.name: tensor}
    stem = place.name.removesuffix(WEIGHT)
    stored = quantize(tensor, scheme, tensor.dtype)
    if not tensor.is_meta and not bool(stored.scales.isfinite().all()):
        raise CheckpointError(
            f"{place.path}: tensor {place.name} has numbers that are NaN or infinite, "
            f"which cannot be quantized; download the file again"
        )
    by_suffix = tensors_of(scheme, stored, tensor.shape)
    return {stem + suffix: written for suffix, written in by_suffix.items()}


def _unquantized(spec: ModelSpec, jobs: Sequence[QuantizeJob]) -> list[str]:
    """Returns the names of modules that may be linear and are not quantized, and regular
    expressions of the parts of a model that minfer does not read.
    """
    names = dict[str, None]()
    for job in jobs:
        name, shape = job.place.name, job.sizes[0].shape
        skipped = next(
            (prefix for prefix in spec.skipped_prefixes if name.startswith(prefix)), None
        )
        if skipped is not None:
            names["re:.*" + skipped.replace(".", r"\.") + ".*"] = None
        elif not job.scheme.is_plain or name.endswith(UNQUANTIZED_SUFFIXES):
            continue
        elif name.endswith(WEIGHT) and len(shape) > 1:
            names[name.removesuffix(WEIGHT)] = None
    return [*names]


def _side_files(source: Path) -> Iterator[Path]:
    """Yields the paths, relative to the folder, of files that are copied: tokenizer,
    templates, settings, licence.
    """
    for path in sorted([*source.iterdir(), *(source / TEMPLATES).glob("*")]):
        name = path.name
        if not path.is_file() or name.startswith(".") or name == CONFIG:
            continue
        if not name.endswith(WEIGHT_FILES):
            yield path.relative_to(source)


def _write(
    source: Path,
    output: Path,
    config: Mapping[str, Any],
    jobs: Sequence[QuantizeJob],
    sides: Sequence[Path],
) -> None:
    """Write a folder under another name beside `output`, then rename it. Raises OSError,
    `OutputError`.
    """
    output = output.resolve()
    parent = output.parent
    parent.mkdir(parents=True, exist_ok=True)
    total = sum(job.bytes for job in jobs)
    needed = total + sum((source / side).stat().st_size for side in sides)
    if needed > (free := shutil.disk_usage(parent).free):
        raise OutputError(
            f"{output}: {needed / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free; "
            f"make space, or choose a folder on another disk"
        )
    partial = parent / f".{output.name}.{os.getpid()}.partial"
    partial.mkdir()
    try:
        for side in sides:
            (partial / side).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / side, partial / side)
        _write_weights(partial, jobs, total)
        _write_json(partial / CONFIG, config)
        partial.replace(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_weights(folder: Path, jobs: Sequence[QuantizeJob], total: int) -> None:
    """Write the weights in one file, or in several and an index."""
    shards, size = [list[QuantizeJob]()], 0
    for job in jobs:
        size += job.bytes
        if shards[-1] and size > MAX_SHARD_BYTES:
            shards.append([])
            size = job.bytes
        shards[-1].append(job)
    files = dict[str, str]()
    with weights_bar(total) as bar:
        for i, shard in enumerate(shards, 1):
            name = f"model-{i:05}-of-{len(shards):05}{SUFFIX}"
            name = SINGLE_NAME if len(shards) == 1 else name
            sizes = [size for job in shard for size in job.sizes]
            write_file(folder / name, sizes, _tensors(shard), bar.update)
            files |= dict.fromkeys((size.name for size in sizes), name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": files}
        _write_json(folder / INDEX_NAME, index)


def _tensors(jobs: Sequence[QuantizeJob]) -> "Iterator[tuple[str, Tensor]]":
    """Yields the tensors that jobs write, with their names."""
    for job in jobs:
        yield from _tensors_to_write(job.place, job.scheme, job.place.tensor()).items()


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")

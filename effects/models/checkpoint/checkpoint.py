"""Reads a Hugging Face checkpoint folder: config.json and safetensors, nothing that can
execute. A GGUF file is in the place of a folder.

Every tensor is checked against the spec before any is copied, so that a damaged
checkpoint fails in milliseconds with the names of what is wrong. torch is imported only
where tensors are made.
"""

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve

from minfer.effects.models.architecture.layers import finish_layer, layer_parts
from minfer.effects.models.architecture.quantization import Files
from minfer.effects.models.architecture.quantization_files import with_quantization
from minfer.effects.models.architecture.refusals import quantized_objection
from minfer.effects.models.architecture.spec import (
    EMBED,
    LM_HEAD,
    ModelSpec,
    layer_prefix,
)
from minfer.effects.models.architecture.weights import (
    Weights,
    checkpoint_parts,
    empty_weights,
    expected_parts,
)
from minfer.effects.models.checkpoint.random_weights import (
    random_weights as random_weights,
)
from minfer.effects.models.checkpoint.tensor_names import model_name
from minfer.effects.models.checkpoint.weight_files import (
    INDEX_NAME,
    FoundTensors,
    TensorPlace,
    check_same,
    find_tensors,
    list_names,
    no_model,
)
from minfer.effects.models.checkpoint.weight_files import shards as shards
from minfer.effects.models.config_reader import CheckpointError as CheckpointError
from minfer.effects.models.config_reader import (
    ModelConfigError,
    UnsupportedModelError,
    whole,
)
from minfer.effects.models.formats import packing
from minfer.effects.models.formats.compressed_tensors import (
    ZERO_POINT,
    CompressedTensors,
)
from minfer.effects.models.gguf.config import gguf_config
from minfer.effects.models.gguf.container import is_gguf
from minfer.effects.models.json_files import CorruptFileError as CorruptFileError
from minfer.effects.models.json_files import damaged
from minfer.effects.models.json_files import read_optional as read_optional
from minfer.effects.models.layout.rank_parts import Cut, RankPart, rank_parts
from minfer.effects.models.layout.shapes import weight_bytes
from minfer.effects.models.parts import Part
from minfer.effects.models.progress import disabled
from minfer.effects.models.ranks import WHOLE, Place
from minfer.values.checks import LARGEST_TOKEN

if TYPE_CHECKING:
    from torch import Tensor

# Buffers that old versions of transformers wrote although they are computed, not learned.
HARMLESS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
BIAS = ".bias"  # AutoGPTQ gives every matrix one, of zeros where the model has none
STACKED = (
    ".experts.gate_up_proj",
    ".experts.gate_up_proj_blocks",
)  # end names of matrices of all experts of a layer
_log = logging.getLogger("minfer.weights")


class TensorMismatchError(CheckpointError):
    """Tensors are missing, unexpected, or of another shape or type than the config
    implies.
    """


def eos_ids(folder: Path) -> tuple[int, ...]:
    """Returns the ids that end a sequence, from generation_config.json and config.json;
    invalid ids are left out.
    """
    ids: list[Any] = []
    if is_gguf(folder):
        files = [gguf_config(folder)]
    else:
        names = "generation_config.json", "config.json"
        files = [read_optional(folder / name) for name in names]
    for file in files:
        value = file.get("eos_token_id")
        ids += map(whole, value if isinstance(value, list) else [value])
    ids = [one for one in ids if type(one) is int and 0 <= one <= LARGEST_TOKEN]
    return tuple(dict.fromkeys(ids))


def read_config(folder: str | Path) -> dict[str, Any]:
    """Returns the contents of a checkpoint folder's config.json, or what the metadata of
    a GGUF file stand for. Raises `ModelConfigError`; of GGUF files, `CheckpointError`.
    """
    if is_gguf(Path(folder)):
        return gguf_config(folder)
    path = config_path(Path(folder))
    if not path.is_file():
        if why := no_model(path.parent):
            raise UnsupportedModelError(why)
        raise ModelConfigError(
            f"{path}: not found; a model is a Hugging Face checkpoint folder with "
            f"config.json, safetensors weights and tokenizer.json"
        )
    try:
        return with_quantization(path.parent, read_optional(path))
    except CorruptFileError as error:
        raise ModelConfigError(str(error)) from error


def config_path(folder: Path) -> Path:
    """Returns the file that describes a checkpoint's model."""
    return folder if is_gguf(folder) else folder / "config.json"


def _described_by(path: Path) -> str:
    """Returns what errors call the description of the model that a weight file is of."""
    return "metadata" if is_gguf(path) else "config.json"


def load_weights(
    folder: str | Path,
    spec: ModelSpec,
    dtype: str | None = None,
    device: str = "cpu",
    place: Place = WHOLE,
) -> Weights:
    """Load, check, cast and fuse a checkpoint's weights, in `dtype` (the config's own
    when None): those of a rank, which reads no others.

    Raises `CorruptFileError` for damaged or missing files, `TensorMismatchError` for
    missing, unexpected or misshapen tensors, `UnsupportedModelError` for what minfer does
    not run.
    """
    dtype = dtype or spec.dtype
    with ExitStack() as stack:
        found = find_tensors(Path(folder), stack, dtype, device)
        files = files_of(spec, found)
        where = _by_model(spec, found, files, Path(folder))
        own = spec if place == WHOLE else spec.for_rank(place)
        whole = expected_parts(spec, files)
        weights = empty_weights(own, dtype, device)
        if device == "cpu" or not found.streams:
            weights = _filled(own, weights, files, where, dtype, whole)
        else:
            parts = rank_parts(own, checkpoint_parts(own, weights, files), whole)
            _stream([*parts], where)
            layers = (finish_layer(layer, dtype) for layer in weights.layers)
            weights = evolve(weights, layers=tuple(layers))
        if spec.tie_word_embeddings and LM_HEAD in where and own.embed_rows:
            _check_copy(own, where[LM_HEAD], weights.embed)
    return weights


def planned_parts(
    spec: ModelSpec, found: FoundTensors, folder: Path
) -> Iterator[tuple[TensorPlace, Part]]:
    """Yields each tensor that a model has of a checkpoint, checked by its header, and
    what `load_weights` makes of it; of a model that transformers runs and loads, those of
    quantized matrices. Raises `CheckpointError` as `load_weights`.
    """
    import torch

    files = files_of(spec, found)
    where = _by_model(spec, found, files, folder)
    if spec.tie_word_embeddings and LM_HEAD in where:
        embed = where[EMBED].tensor()
        _check_copy(spec, where[LM_HEAD], embed.to(getattr(torch, spec.dtype)))
    for name, part in expected_parts(spec, files).items():
        if name in where:
            yield where[name], part


def files_of(spec: ModelSpec, found: FoundTensors) -> Files:
    """Returns how the files store matrices: of experts, both forms occur."""
    form = None if spec.quantization is None else spec.quantization.format
    stacked = any(place.name.endswith(STACKED) for place in found.places.values())
    if isinstance(form, CompressedTensors):
        zeros = [one for name, one in found.places.items() if name.endswith(ZERO_POINT)]
        kinds = {one.file.get_slice(one.name).get_dtype() for one in zeros[:1]}
        form = evolve(form, byte_zeros=not kinds <= {*packing.TYPES})
    return Files(form, stacked)


def _filled(
    spec: ModelSpec,
    weights: Weights,
    files: Files,
    where: Mapping[str, TensorPlace],
    dtype: str,
    whole: Mapping[str, Part],
) -> Weights:
    """Returns the weights with every tensor in its place, a layer after another, so that
    none but one is in memory in two forms.
    """
    from tqdm import tqdm  # here: `minfer plan` reads no weights

    layers, rest = list(weights.layers), evolve(weights, layers=())
    del weights
    ends = checkpoint_parts(evolve(spec, layers=()), rest, files)
    for one in rank_parts(spec, ends, whole):
        one.fill(where[one.part.name].tensor(one.cut))
    hidden = disabled(weight_bytes(spec, cuda=False))
    for i in tqdm(range(len(layers)), desc="Layers", disable=hidden):
        prefix = layer_prefix(spec.first_layer + i)
        found = layer_parts(spec.layers[i], layers[i], files)
        for one in rank_parts(spec, (part.under(prefix) for part in found), whole):
            if (place := where.get(one.part.name)) is not None:  # else it is optional
                one.fill(place.tensor(one.cut))
        layers[i] = finish_layer(layers[i], dtype)
    return evolve(rest, layers=tuple(layers))


def _stream(parts: list[RankPart], where: Mapping[str, TensorPlace]) -> None:
    """Fill every tensor, on a GPU."""
    from minfer.effects.models.checkpoint.stream_weights import TensorJob, stream_weights

    stream_weights(
        [
            TensorJob(where[one.part.name].path, where[one.part.name].name, one)
            for one in parts
            if one.part.name in where
        ]
    )


def _check_copy(spec: ModelSpec, stored: TensorPlace, embed: "Tensor") -> None:
    """Check that an output head stored beside tied embeddings is a copy; else the config
    is wrong.
    """
    rows = spec.vocab_rows
    cut = Cut(0, min(rows.start, spec.vocab_size), min(rows.stop, spec.vocab_size))
    head = stored.tensor(cut).to(embed.dtype)
    if not head.equal(embed[: len(head)].cpu()):
        raise TensorMismatchError(
            f"{stored.path}: tensor {LM_HEAD} differs from {EMBED} although config.json "
            f"ties them; set tie_word_embeddings to false"
        )


def _by_model(
    spec: ModelSpec, found: FoundTensors, files: Files, folder: Path
) -> dict[str, TensorPlace]:
    """Returns the places by the model's tensor names, checked by headers alone.

    As in transformers, `model.` is put before a name, or removed from it, where that
    makes it one of the model's; and a tied model may store its embeddings as the output
    head.
    """
    expected = expected_parts(spec, files)
    inert = () if files.format is None else files.format.inert
    odd = sorted(name for name in found.places if name not in expected)
    odd = [one for one in odd if not one.startswith(spec.skipped)]
    if files.format is None and (why := quantized_objection(odd)):
        raise UnsupportedModelError(f"{folder}: {why}")
    known = {*expected, LM_HEAD}
    where: dict[str, TensorPlace] = {}
    for place in found.places.values():
        if place.name.startswith(spec.skipped) or place.name.endswith(inert):
            continue
        name = model_name(spec, place.name, known)
        if name in where:
            check_same(where[name], place)
        where[name] = place
    if spec.tie_word_embeddings and EMBED not in where and LM_HEAD in where:
        where[EMBED] = where.pop(LM_HEAD)
    _refuse_quantized_ends(where)
    needed = (name for name, part in expected.items() if not part.optional)
    if missing := [name for name in needed if name not in where]:
        raise _missing(missing, expected[missing[0]].shape, found, folder)
    if spec.tie_word_embeddings and LM_HEAD in where:
        expected[LM_HEAD] = expected[EMBED]
    if not spec.parameters:  # else transformers reports what its model has not
        surplus = {n: p for n, p in where.items() if n not in expected}
        _check_surplus(spec, found, surplus)
    there = {name: where[name] for name in expected if name in where}
    for name, place in there.items():
        part = expected[name]
        _check_header(part, place, _described_with_keys(spec, files, part, place.path))
    return there


def _described_with_keys(spec: ModelSpec, files: Files, part: Part, path: Path) -> str:
    """Returns what a tensor's shape follows from: of a quantized matrix, keys of the
    quantization, too.
    """
    described, how = _described_by(path), spec.quantization
    keys = "" if files.format is None else files.format.shaped_by
    if how is None or not part.matrix or not keys or how.scheme_of(part.matrix).is_plain:
        return described
    return f"{described} and {how.file or 'its quantization_config'} ({keys})"


def _refuse_quantized_ends(where: Mapping[str, TensorPlace]) -> None:
    """Refuse scales of embeddings, or of the output head, which are never quantized."""
    for name in where:
        stem, _, end = name.rpartition(".")
        if end not in ("weight", "bias") and f"{stem}.weight" in (EMBED, LM_HEAD):
            raise UnsupportedModelError(
                f"{where[name].path}: tensor {name}: quantized embeddings and output "
                f"heads are not supported; use a checkpoint in which they are not"
            )


def _missing(
    names: list[str], shape: tuple[int, ...], found: FoundTensors, folder: Path
) -> CheckpointError:
    """Returns the error about files that lack tensors of the model."""
    listed = found.listed or {}
    for name in names:
        if name in listed:
            what = f"lacks {list_names(names)}, other than {INDEX_NAME} says"
            return damaged(listed[name], what)
    described = _described_by(folder)
    why = f"the checkpoint is incomplete or its {described} describes another model"
    if names == [LM_HEAD]:
        why = (
            "download what is missing, or, if the model's output head is its embedding, "
            "set tie_word_embeddings to true in config.json"
        )
    return TensorMismatchError(
        f"{folder}: missing tensor {list_names(names)} (shape {list(shape)}); {why}"
    )


def _check_surplus(
    spec: ModelSpec, found: FoundTensors, surplus: Mapping[str, TensorPlace]
) -> None:
    """Refuse tensors that the model does not have, unless the index leaves them out
    too.
    """
    extra = {n: p for n, p in surplus.items() if not is_harmless(n, p)}
    if bad := sorted(name for name in extra if found.is_listed(extra[name].name)):
        raise TensorMismatchError(
            f"{extra[bad[0]].path}: unexpected tensor {list_names(bad)}; the checkpoint "
            f"has parts that {spec.family.architecture} with this config.json does not "
            f"have"
        )
    if extra:
        path = next(iter(extra.values())).path
        names = list_names(sorted(extra))
        _log.warning("%s: %s not in %s and not read", path, names, INDEX_NAME)


def is_harmless(name: str, place: TensorPlace) -> bool:
    """Returns whether a tensor that the model does not have would change nothing."""
    if name.endswith(HARMLESS):
        return True
    return name.endswith(BIAS) and not place.tensor().any()


def _check_header(part: Part, place: TensorPlace, described: str) -> None:
    """Compare a tensor's shape and type with the expected ones, which follow from what is
    `described`.
    """
    header = place.file.get_slice(place.name)
    found, shape = tuple(header.get_shape()), part.shape
    if found != shape and (math.prod(shape) > 1 or math.prod(found) != 1):
        raise TensorMismatchError(
            f"{place.path}: tensor {place.name} has shape {list(found)}, expected "
            f"{list(shape)} by {described}; use the {_described_by(place.path)} that "
            f"belongs to these weights"
        )
    if (kind := header.get_dtype()) not in part.types:
        raise UnsupportedModelError(
            f"{place.path}: tensor {place.name} has type {kind}, expected one of "
            f"{', '.join(part.types)}; use the config.json that belongs to these "
            f"weights, whose quantization_config says how matrices are stored; quantized "
            f"ones need their scales"
        )

"""Reads a Hugging Face checkpoint folder: config.json and safetensors, nothing that can
execute. A GGUF file is in the place of a folder.

Every tensor is checked against the spec before any is copied, so that a damaged
checkpoint fails in milliseconds with the names of what is wrong. torch is imported only
where tensors are made.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve

from minfer.effects.models.architecture.layers import finish_layer, layer_parts
from minfer.effects.models.architecture.quantization import CheckpointForm
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
    whole_to_int,
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
from minfer.effects.models.parts import WeightPart
from minfer.effects.models.progress import bar_disabled
from minfer.effects.models.ranks import WHOLE_MODEL, RankInfo
from minfer.values.checks import LARGEST_TOKEN
from minfer.values.texts import counted

if TYPE_CHECKING:
    from torch import Tensor

# Buffers that old versions of transformers wrote although they are computed, not learned.
HARMLESS_SUFFIXES = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
BIAS_SUFFIX = (
    ".bias"  # AutoGPTQ gives every matrix one, of zeros where the model has none
)
STACKED_SUFFIXES = (
    ".experts.gate_up_proj",
    ".experts.gate_up_proj_blocks",
)  # end names of matrices of all experts of a layer
_log = logging.getLogger("minfer.weights")
_start_log = logging.getLogger("minfer.start")  # which a server shows


class TensorMismatchError(CheckpointError):
    """Tensors are missing, unexpected, or of another shape or type than the config
    implies.
    """


def eos_ids(folder: Path) -> tuple[int, ...]:
    """Returns the ids that end a sequence, from generation_config.json and config.json,
    or its `text_config` where the config itself has none; invalid ids are left out.
    """
    ids: list[Any] = []
    if is_gguf(folder):
        files = [gguf_config(folder)]
    else:
        names = "generation_config.json", "config.json"
        files = [read_optional(folder / name) for name in names]
    for file in files:
        text = file.get("text_config")
        value = file.get("eos_token_id")
        if value is None and isinstance(text, dict):
            value = text.get("eos_token_id")
        ids += map(whole_to_int, value if isinstance(value, list) else [value])
    ids = [token for token in ids if type(token) is int and 0 <= token <= LARGEST_TOKEN]
    return tuple(dict.fromkeys(ids))


def read_config(folder: str | Path) -> dict[str, Any]:
    """Returns the contents of a checkpoint folder's config.json, or what the metadata of
    a GGUF file stand for. Raises `ModelConfigError`; of GGUF files, `CheckpointError`.
    """
    if is_gguf(Path(folder)):
        return gguf_config(folder)
    path = config_path(Path(folder))
    if not path.is_file():
        if reason := no_model(path.parent):
            raise UnsupportedModelError(reason)
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
    rank_info: RankInfo = WHOLE_MODEL,
) -> Weights:
    """Load, check, cast and fuse a checkpoint's weights, in `dtype` (the config's own
    when None): those of a rank, which reads no others.

    Raises `CorruptFileError` for damaged or missing files, `TensorMismatchError` for
    missing, unexpected or misshapen tensors, `UnsupportedModelError` for what minfer does
    not run.
    """
    dtype = dtype or spec.dtype
    with ExitStack() as stack:
        found_tensors = find_tensors(Path(folder), stack, dtype, device)
        form = checkpoint_form(spec, found_tensors)
        places = _checked_places(spec, found_tensors, form, Path(folder))
        skipped = skipped_tensors(spec, found_tensors.places)
        if skipped and rank_info.rank == 0:
            _start_log.info("%s: not read are %s", folder, skipped)
        rank_spec = spec if rank_info == WHOLE_MODEL else spec.for_rank(rank_info)
        model_parts = expected_parts(spec, form)
        weights = empty_weights(rank_spec, dtype, device)
        if device == "cpu" or not found_tensors.streams:
            weights = _fill_weights(rank_spec, weights, form, places, dtype, model_parts)
        else:
            own_parts = rank_parts(
                rank_spec, checkpoint_parts(rank_spec, weights, form), model_parts
            )
            stream_parts([*own_parts], places)
            layers = (finish_layer(layer, dtype) for layer in weights.layers)
            weights = evolve(weights, layers=tuple(layers))
        if spec.tie_word_embeddings and LM_HEAD in places and rank_spec.embed_rows:
            _check_copy(rank_spec, places[LM_HEAD], weights.embed)
    return weights


def planned_parts(
    spec: ModelSpec, found_tensors: FoundTensors, folder: Path
) -> Iterator[tuple[TensorPlace, WeightPart]]:
    """Yields each tensor that a model has of a checkpoint, checked by its header, and
    what `load_weights` makes of it; of a model that transformers runs and loads, those of
    quantized matrices. Raises `CheckpointError` as `load_weights`.
    """
    import torch

    form = checkpoint_form(spec, found_tensors)
    places = _checked_places(spec, found_tensors, form, folder)
    if spec.tie_word_embeddings and LM_HEAD in places:
        embed = places[EMBED].tensor()
        _check_copy(spec, places[LM_HEAD], embed.to(getattr(torch, spec.dtype)))
    for name, weight_part in expected_parts(spec, form).items():
        if name in places:
            yield places[name], weight_part


def checkpoint_form(spec: ModelSpec, found_tensors: FoundTensors) -> CheckpointForm:
    """Returns how the files store matrices: of experts, both forms occur."""
    weight_format = None if spec.quantization is None else spec.quantization.format
    places = found_tensors.places.values()
    stacked = any(place.name.endswith(STACKED_SUFFIXES) for place in places)
    if isinstance(weight_format, CompressedTensors):
        zeros = [
            place
            for name, place in found_tensors.places.items()
            if name.endswith(ZERO_POINT)
        ]
        types = {place.file.get_slice(place.name).get_dtype() for place in zeros[:1]}
        weight_format = evolve(weight_format, byte_zeros=not types <= {*packing.TYPES})
    return CheckpointForm(weight_format, stacked, _are_transposed(spec, places))


def _are_transposed(spec: ModelSpec, places: Iterable[TensorPlace]) -> bool:
    """Returns whether tensors of all experts' matrices are [experts, in, out]: by that of
    the product down, whose outputs are the model's. As in transformers, a square one is
    not.
    """
    keys = spec.family.experts
    if keys is None or not keys.stored.maybe_transposed:
        return False
    shapes = (
        place.file.get_slice(place.name).get_shape()
        for place in places
        if place.name.endswith(f".{keys.stored.experts}.down_proj")
    )
    shape = [*next(shapes, [])]
    return bool(shape) and shape[-1] == spec.hidden_size != shape[1]


def _fill_weights(
    spec: ModelSpec,
    weights: Weights,
    form: CheckpointForm,
    places: Mapping[str, TensorPlace],
    dtype: str,
    model_parts: Mapping[str, WeightPart],
) -> Weights:
    """Returns the weights with every tensor filled, a layer after another, so that only
    one layer at a time is in memory in two forms.
    """
    from tqdm import tqdm  # here: `minfer plan` reads no weights

    layers, others = list(weights.layers), evolve(weights, layers=())
    del weights
    other_parts = checkpoint_parts(evolve(spec, layers=()), others, form)
    for rank_part in rank_parts(spec, other_parts, model_parts):
        rank_part.fill(places[rank_part.part.name].tensor(rank_part.cut))
    disable = bar_disabled(weight_bytes(spec, cuda=False))
    for i in tqdm(range(len(layers)), desc="Layers", disable=disable):
        prefix = layer_prefix(spec.first_layer + i)
        weight_parts = (
            weight_part.with_prefix(prefix)
            for weight_part in layer_parts(spec.layers[i], layers[i], form)
        )
        for rank_part in rank_parts(spec, weight_parts, model_parts):
            place = places.get(rank_part.part.name)
            if place is not None:  # else it is optional
                rank_part.fill(place.tensor(rank_part.cut))
        layers[i] = finish_layer(layers[i], dtype)
    return evolve(others, layers=tuple(layers))


def stream_parts(own_parts: list[RankPart], places: Mapping[str, TensorPlace]) -> None:
    """Fill every tensor, on a GPU."""
    from minfer.effects.models.checkpoint.stream_weights import TensorJob, stream_weights

    stream_weights(
        [
            TensorJob(place.path, place.name, rank_part)
            for rank_part in own_parts
            if (place := places.get(rank_part.part.name)) is not None
        ]
    )


def _check_copy(spec: ModelSpec, stored: TensorPlace, embed: "Tensor") -> None:
    """Check that an output head stored beside tied embeddings is a copy; else the config
    is wrong.
    """
    rows = spec.vocab_rows
    first, last = (min(row, spec.vocab_size) for row in (rows.start, rows.stop))
    cut = Cut(0, (range(first, last),))
    head = stored.tensor(cut).to(embed.dtype)
    if not head.equal(embed[: len(head)].cpu()):
        raise TensorMismatchError(
            f"{stored.path}: tensor {LM_HEAD} differs from {EMBED} although config.json "
            f"ties them; set tie_word_embeddings to false"
        )


def _checked_places(
    spec: ModelSpec, found_tensors: FoundTensors, form: CheckpointForm, folder: Path
) -> dict[str, TensorPlace]:
    """Returns the places by the model's tensor names, checked by headers alone.

    As in transformers, `model.` is put before a name, or removed from it, where that
    makes it one of the model's; and a tied model may store its embeddings as the output
    head.
    """
    expected = expected_parts(spec, form)
    inert = () if form.format is None else form.format.inert
    unexpected = sorted(name for name in found_tensors.places if name not in expected)
    unexpected = [
        name for name in unexpected if not name.startswith(spec.skipped_prefixes)
    ]
    if form.format is None and (objection := quantized_objection(unexpected)):
        raise UnsupportedModelError(f"{folder}: {objection}")
    names = {*expected, LM_HEAD}
    places: dict[str, TensorPlace] = {}
    for place in found_tensors.places.values():
        if place.name.startswith(spec.skipped_prefixes) or place.name.endswith(inert):
            continue
        name = model_name(spec, place.name, names)
        if name in places:
            check_same(places[name], place)
        places[name] = place
    if spec.tie_word_embeddings and EMBED not in places and LM_HEAD in places:
        places[EMBED] = places.pop(LM_HEAD)
    _refuse_quantized_ends(places)
    needed = (name for name, weight_part in expected.items() if not weight_part.optional)
    if missing := [name for name in needed if name not in places]:
        raise _missing(missing, expected[missing[0]].shape, found_tensors, folder)
    if spec.tie_word_embeddings and LM_HEAD in places:
        expected[LM_HEAD] = expected[EMBED]
    if not spec.parameters:  # else transformers reports what its model has not
        surplus = {name: place for name, place in places.items() if name not in expected}
        _check_surplus(spec, found_tensors, surplus)
    used_places = {name: places[name] for name in expected if name in places}
    for name, place in used_places.items():
        weight_part = expected[name]
        described = _described_with_keys(spec, form, weight_part, place.path)
        check_header(weight_part, place, described)
    return used_places


def _described_with_keys(
    spec: ModelSpec, form: CheckpointForm, weight_part: WeightPart, path: Path
) -> str:
    """Returns what a tensor's shape follows from: of a quantized matrix, keys of the
    quantization, too.
    """
    described, quantization = _described_by(path), spec.quantization
    keys = "" if form.format is None else form.format.shaped_by
    if (
        quantization is None
        or not weight_part.matrix
        or not keys
        or quantization.scheme_of(weight_part.matrix).is_plain
    ):
        return described
    return f"{described} and {quantization.file or 'its quantization_config'} ({keys})"


def _refuse_quantized_ends(places: Mapping[str, TensorPlace]) -> None:
    """Refuse scales of embeddings, or of the output head, which are never quantized."""
    for name in places:
        stem, _, end = name.rpartition(".")
        if end not in ("weight", "bias") and f"{stem}.weight" in (EMBED, LM_HEAD):
            raise UnsupportedModelError(
                f"{places[name].path}: tensor {name}: quantized embeddings and output "
                f"heads are not supported; use a checkpoint in which they are not"
            )


def skipped_tensors(spec: ModelSpec, names: Iterable[str]) -> str:
    """Returns how many of these tensors are not read, as they are of other parts of a
    checkpoint than this model, and its MTP head if it drafts, in all and by how their
    names begin; empty: none.
    """
    head = spec.draft_head
    is_read = head.reads if head is not None and head.kind == "mtp" else _is_none
    counts = Counter(
        prefix
        for name in names
        for prefix in spec.skipped_prefixes
        if name.startswith(prefix) and not is_read(name)
    )
    listed = ", ".join(f"{prefix}* ({count})" for prefix, count in counts.items())
    if not counts:
        return ""
    return f"{counted(counts.total(), 'tensor')} of other parts: {listed}"


def _is_none(_: str) -> bool:
    """No tensor is a head's."""
    return False


def _missing(
    names: list[str], shape: tuple[int, ...], found_tensors: FoundTensors, folder: Path
) -> CheckpointError:
    """Returns the error about files that lack tensors of the model."""
    listed = found_tensors.listed or {}
    for name in names:
        if name in listed:
            fault = f"lacks {list_names(names)}, other than {INDEX_NAME} says"
            return damaged(listed[name], fault)
    described = _described_by(folder)
    reason = f"the checkpoint is incomplete or its {described} describes another model"
    if names == [LM_HEAD]:
        reason = (
            "download what is missing, or, if the model's output head is its embedding, "
            "set tie_word_embeddings to true in config.json"
        )
    return TensorMismatchError(
        f"{folder}: missing tensor {list_names(names)} (shape {list(shape)}); {reason}"
    )


def _check_surplus(
    spec: ModelSpec, found_tensors: FoundTensors, surplus: Mapping[str, TensorPlace]
) -> None:
    """Refuse tensors that the model does not have, unless the index leaves them out
    too.
    """
    extra = {
        name: place for name, place in surplus.items() if not is_harmless(name, place)
    }
    listed = (
        name for name, place in extra.items() if found_tensors.is_listed(place.name)
    )
    if unexpected := sorted(listed):
        raise TensorMismatchError(
            f"{extra[unexpected[0]].path}: unexpected tensor {list_names(unexpected)}; "
            f"the checkpoint has parts that {spec.family.architecture} with this "
            f"config.json does not have"
        )
    if extra:
        path = next(iter(extra.values())).path
        names = list_names(sorted(extra))
        _log.warning("%s: %s not in %s and not read", path, names, INDEX_NAME)


def is_harmless(name: str, place: TensorPlace) -> bool:
    """Returns whether a tensor that the model does not have would change nothing."""
    is_empty = 0 in place.file.get_slice(place.name).get_shape()
    if is_empty or name.endswith(HARMLESS_SUFFIXES):
        return True
    return name.endswith(BIAS_SUFFIX) and not place.tensor().any()


def check_header(weight_part: WeightPart, place: TensorPlace, described: str) -> None:
    """Compare a tensor's shape and type with the expected ones, which follow from what is
    `described`.
    """
    header = place.file.get_slice(place.name)
    stored_shape, shape = tuple(header.get_shape()), weight_part.shape
    if stored_shape != shape and (math.prod(shape) > 1 or math.prod(stored_shape) != 1):
        raise TensorMismatchError(
            f"{place.path}: tensor {place.name} has shape {list(stored_shape)}, expected "
            f"{list(shape)} by {described}; use the {_described_by(place.path)} that "
            f"belongs to these weights"
        )
    if (kind := header.get_dtype()) not in weight_part.types:
        raise UnsupportedModelError(
            f"{place.path}: tensor {place.name} has type {kind}, expected one of "
            f"{', '.join(weight_part.types)}; use the config.json that belongs to these "
            f"weights, whose quantization_config says how matrices are stored; quantized "
            f"ones need their scales"
        )

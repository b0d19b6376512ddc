"""Loads a draft head from files, or makes a random one.

As of a model, every tensor is checked by the files' headers before any is read, and which
matrices are quantized is what the names of tensors say.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

from attrs import evolve

from minfer.effects.models.architecture.draft_head import EAGLE3, MTP, HeadSpec
from minfer.effects.models.architecture.layers import finish_layer
from minfer.effects.models.architecture.products import in_kernel_layout
from minfer.effects.models.architecture.quantization import CheckpointForm
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.checkpoint.checkpoint import (
    TensorMismatchError,
    check_header,
    checkpoint_form,
    config_path,
    is_harmless,
    read_config,
    stream_parts,
)
from minfer.effects.models.checkpoint.random_weights import (
    draw_weights,
    random_form,
    random_pool,
)
from minfer.effects.models.checkpoint.stored_matrices import (
    stored_tensor_names,
    unquantized,
)
from minfer.effects.models.checkpoint.tensor_names import model_name, name_in_format
from minfer.effects.models.checkpoint.weight_files import (
    FoundTensors,
    TensorPlace,
    find_tensors,
    list_names,
)
from minfer.effects.models.config_reader import CheckpointError, UnsupportedModelError
from minfer.effects.models.draft_heads.eagle3_head import eagle3_name, read_eagle3_head
from minfer.effects.models.draft_heads.head_weights import (
    DraftHeadWeights,
    empty_head,
    expected_head_parts,
    head_parts,
)
from minfer.effects.models.draft_heads.mtp_head import read_mtp_head
from minfer.effects.models.gguf.container import is_gguf
from minfer.effects.models.layout.rank_parts import rank_parts
from minfer.effects.models.parts import WeightPart
from minfer.effects.models.ranks import WHOLE_MODEL, RankInfo


def read_head(
    target: ModelSpec, method: str, folder: str | Path, *, random: bool = False
) -> HeadSpec:
    """Returns the head of `method` in a checkpoint folder, the target's own for `MTP`.
    `random`: its weights will be random, and no files of weights are needed.

    Raises `CheckpointError` for a head that is not there, is of another model, or is not
    supported.
    """
    folder = Path(folder)
    if is_gguf(folder):
        raise UnsupportedModelError(
            f"{folder}: draft heads in GGUF files are not supported; use a checkpoint "
            f"with safetensors, or another method of speculation, such as ngram"
        )
    config, source = read_config(folder), str(config_path(folder))
    stored_names = [] if random else stored_tensor_names(folder)
    if method == MTP:
        head = read_mtp_head(target, config, source)
    else:
        own_names = {*map(eagle3_name, stored_names)}
        head = read_eagle3_head(target, config, own_names or None, source)
    if not stored_names:
        return head
    matrices = [*chain.from_iterable(sizes.names for sizes in head.matrices)]
    quantization = head.quantization
    markers = () if quantization is None else quantization.format.markers
    wanted = {name + end for name in matrices for end in (".weight", *markers)}
    names = {_head_name(target, head, name, wanted) for name in stored_names}
    if not wanted & names:
        raise _no_head(head, folder)
    if quantization is None or quantization.at_load:
        return head
    plain = frozenset(unquantized(matrices, quantization, names))
    return evolve(head, quantization=evolve(quantization, plain=plain))


def load_head(
    folder: str | Path,
    target: ModelSpec,
    head: HeadSpec,
    dtype: str | None = None,
    device: str = "cpu",
    rank_info: RankInfo = WHOLE_MODEL,
) -> DraftHeadWeights:
    """Load, check, cast and fuse a head's weights, of `read_head`, in `dtype` (the
    target's when None): those of a rank. `target` and `head` are of the whole model.

    Raises `CheckpointError` as `load_weights` of a model.
    """
    folder, dtype = Path(folder), dtype or target.dtype
    with ExitStack() as stack:
        found_tensors = find_tensors(folder, stack, dtype, device)
        form = head_form(target, head, found_tensors)
        model_parts = expected_head_parts(head, dtype, form)
        places = checked_places(target, head, model_parts, found_tensors, folder)
        rank_head = head.for_rank(rank_info)
        weights = empty_head(rank_head, dtype, device, rank_info.parallel.tensor)
        own_parts = rank_parts(
            _spec_for_rank(target, rank_info),
            head_parts(rank_head, weights, form),
            model_parts,
        )
        if device == "cpu":
            for rank_part in own_parts:
                if (place := places.get(rank_part.part.name)) is not None:
                    rank_part.fill(place.tensor(rank_part.cut))
        else:
            stream_parts([*own_parts], places)
    _check_target_ids(head, weights, folder)
    return _finished(weights, dtype)


def random_head(
    target: ModelSpec,
    head: HeadSpec,
    dtype: str | None = None,
    seed: int = 0,
    device: str = "cpu",
    rank_info: RankInfo = WHOLE_MODEL,
) -> DraftHeadWeights:
    """Returns weights drawn as those of `random_weights`. The tokens of a reduced
    vocabulary are spread over the target's.
    """
    dtype = dtype or target.dtype
    form = random_form(head.quantization)
    model_parts = expected_head_parts(head, dtype, form)
    rank_head = head.for_rank(rank_info)
    weights = empty_head(rank_head, dtype, device, rank_info.parallel.tensor)
    own_parts = rank_parts(
        _spec_for_rank(target, rank_info),
        (part for part in head_parts(rank_head, weights, form) if _is_drawn(head, part)),
        model_parts,
    )
    drawn = {name: part for name, part in model_parts.items() if _is_drawn(head, part)}
    draw_weights(
        own_parts, drawn, random_pool(target.initializer_range, dtype, seed, device)
    )
    if weights.target_ids is not None:
        import torch

        step = head.vocab_size // len(weights.target_ids)
        weights.target_ids.copy_(torch.arange(len(weights.target_ids)) * step)
    return _finished(weights, dtype)


def _is_drawn(head: HeadSpec, weight_part: WeightPart) -> bool:
    """Whether a tensor has numbers, not ids."""
    return weight_part.name != head.names.target_ids


def _spec_for_rank(target: ModelSpec, rank_info: RankInfo) -> ModelSpec:
    return target if rank_info == WHOLE_MODEL else target.for_rank(rank_info)


def _finished(weights: DraftHeadWeights, dtype: str) -> DraftHeadWeights:
    """Returns filled weights in the form that kernels multiply with."""
    projection = weights.projection
    return evolve(
        weights,
        layer=finish_layer(weights.layer, dtype),
        projection=None if projection is None else in_kernel_layout(projection),
    )


def _head_name(
    target: ModelSpec, head: HeadSpec, stored_name: str, names: set[str]
) -> str:
    """Returns the name of a tensor of a checkpoint as `head.names` has it."""
    if head.kind == MTP:
        return model_name(target, stored_name, names)
    return name_in_format(head.quantization, eagle3_name(stored_name))


def head_form(
    target: ModelSpec, head: HeadSpec, found_tensors: FoundTensors
) -> CheckpointForm:
    """Returns how the files store matrices of a head's layer, which may be otherwise than
    those of its target.
    """
    places = found_tensors.places
    if head.kind == MTP:
        layer = head.names.layer
        places = {name: place for name, place in places.items() if layer in name}
    own_tensors = evolve(found_tensors, places=places)
    return checkpoint_form(evolve(target, quantization=head.quantization), own_tensors)


def checked_places(
    target: ModelSpec,
    head: HeadSpec,
    model_parts: Mapping[str, WeightPart],
    found_tensors: FoundTensors,
    folder: Path,
) -> dict[str, TensorPlace]:
    """Returns the places of a head's tensors by its names, checked by headers alone.
    Raises `CheckpointError`.
    """
    names = {*model_parts}
    by_name = {
        _head_name(target, head, place.name, names): place
        for place in found_tensors.places.values()
    }
    needed = (name for name, part in model_parts.items() if not part.optional)
    if missing := [name for name in needed if name not in by_name]:
        if not names & by_name.keys():
            raise _no_head(head, folder)
        shape = list(model_parts[missing[0]].shape)
        raise TensorMismatchError(
            f"{folder}: missing tensor {list_names(missing)} (shape {shape}) of the "
            f"draft head; the checkpoint is incomplete or its config.json describes "
            f"another head"
        )
    places = {name: by_name[name] for name in model_parts if name in by_name}
    if unexpected := sorted(_unexpected(head, by_name, names)):
        raise TensorMismatchError(
            f"{by_name[unexpected[0]].path}: unexpected tensor {list_names(unexpected)} "
            f"of the draft head; the head that config.json describes has no such part"
        )
    for name, place in places.items():
        check_header(model_parts[name], place, "config.json")
    return places


def _unexpected(
    head: HeadSpec, by_name: Mapping[str, TensorPlace], names: set[str]
) -> Iterator[str]:
    """Yields the head's tensors that are not in `names`, unless they change nothing."""
    quantization = head.quantization
    inert = () if quantization is None else quantization.format.inert
    for name, place in by_name.items():
        is_own = head.kind == EAGLE3 or name.startswith(head.names.layer)
        if name in names or not is_own or name.startswith(head.names.unread):
            continue
        if not name.endswith(inert) and not is_harmless(name, place):
            yield name


def _no_head(head: HeadSpec, folder: Path) -> CheckpointError:
    """Returns the error about files without any tensor of a head."""
    kind = "an MTP head" if head.kind == MTP else "an EAGLE-3 head"
    return TensorMismatchError(
        f"{folder}: has no tensors of {kind} ({head.names.hidden_norm}, "
        f"{head.names.layer}*), which converted checkpoints may leave out; use the "
        f"original checkpoint, or another method of speculation, such as ngram"
    )


def _check_target_ids(head: HeadSpec, weights: DraftHeadWeights, folder: Path) -> None:
    """Refuse a reduced vocabulary whose tokens are not different tokens of the target.
    Raises `CheckpointError`.
    """
    ids = weights.target_ids
    if ids is None:
        return
    is_inside = bool((ids >= 0).all()) and bool((ids < head.vocab_size).all())
    if not is_inside or not bool(ids.sort().values.diff().all()):
        raise CheckpointError(
            f"{folder}: tensor {head.names.target_ids} does not map the head's tokens to "
            f"different ids below vocab_size = {head.vocab_size}; use the head of this "
            f"model"
        )

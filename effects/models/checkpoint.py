"""Reads a Hugging Face checkpoint folder: config.json and safetensors, nothing that can
execute.

Every tensor is checked against the spec before any is copied, so that a damaged
checkpoint fails in milliseconds with the names of what is wrong. torch is imported only
where tensors are made.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from attrs import frozen

from minfer.effects.models.config_reader import CheckpointError as CheckpointError
from minfer.effects.models.config_reader import ConfigError, UnsupportedModelError
from minfer.effects.models.spec import EMBED, LM_HEAD, ModelSpec
from minfer.effects.models.weights import Weights, empty_weights, named_parts
from minfer.effects.models.weights import random_weights as random_weights

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
FLOAT_DTYPES = ("BF16", "F16", "F32", "F64")
# Buffers that old versions of transformers wrote although they are computed, not learnt.
HARMLESS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
NAMED = 4  # how many names of a kind an error lists


@frozen(eq=False)
class Place:
    """Which file holds a tensor."""

    path: Path
    file: Any  # open; safetensors ships no types


Found = dict[str, Place]  # by the name of the tensor


class CorruptFileError(CheckpointError):
    """A file of the checkpoint is missing, truncated or not what its name says."""


class TensorMismatchError(CheckpointError):
    """Tensors are missing, unexpected, or of another shape or type than the config
    implies.
    """


def _damaged(
    path: Path, what: str, remedy: str = "download it again"
) -> CorruptFileError:
    return CorruptFileError(f"{path}: {what}; {remedy}")


def read_optional(path: Path) -> dict[str, Any]:
    """Read a JSON object; {} if there is no such file. Raises `CorruptFileError`."""
    try:
        value = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, f"cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise _damaged(path, f"must be a JSON object, found {type(value).__name__}")
    return value


def eos_ids(folder: Path) -> tuple[int, ...]:
    """Ids that end a sequence, of generation_config.json and config.json where they name
    any.
    """
    ids: list[Any] = []
    for name in ("generation_config.json", "config.json"):
        value = read_optional(folder / name).get("eos_token_id")
        ids += value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(token for token in ids if type(token) is int))


def read_config(folder: str | Path) -> dict[str, Any]:
    """The contents of a checkpoint folder's config.json. Raises `ConfigError`."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"{path}: not found; a model is a Hugging Face checkpoint folder with "
            f"config.json, safetensors weights and tokenizer.json"
        )
    try:
        return read_optional(path)
    except CorruptFileError as error:
        raise ConfigError(str(error)) from error


def load_weights(
    folder: str | Path, spec: ModelSpec, dtype: str | None = None, device: str = "cpu"
) -> Weights:
    """Load, check, cast and fuse a checkpoint's weights, in `dtype` (the config's own
    when None).

    Raises `CorruptFileError` for damaged or missing files, `TensorMismatchError` for
    missing, unexpected or misshapen tensors, `UnsupportedModelError` for what minfer does
    not run.
    """
    from safetensors import SafetensorError, safe_open

    with ExitStack() as stack:
        where: Found = {}
        for path, names in shards(Path(folder)):
            try:
                file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
                found = list(file.keys())
            except (SafetensorError, OSError) as error:
                raise _damaged(path, f"truncated or corrupt ({error})") from error
            _check_shard(path, names, found, where)
            where.update((name, Place(path, file)) for name in found)
        _check_tensors(spec, where, Path(folder))
        weights = empty_weights(spec, dtype or spec.dtype, device)
        _fill(spec, weights, where, device)
        if spec.tie_word_embeddings and LM_HEAD in where:
            _check_copy(where[LM_HEAD], weights)
    return weights


def _fill(spec: ModelSpec, weights: Weights, where: Found, device: str) -> None:
    """Every tensor to its place in the weights, cast where types differ."""
    if device == "cpu":
        for name, target in named_parts(spec, weights):
            target.copy_(where[name].file.get_tensor(name))
        return
    from minfer.effects.models.stream_weights import Job, stream_weights

    stream_weights(
        [
            Job(where[name].path, name, target)
            for name, target in named_parts(spec, weights)
        ]
    )


def _check_copy(stored: Place, weights: Weights) -> None:
    """A stored output head beside tied embeddings is a copy, or the config is wrong."""
    head = stored.file.get_tensor(LM_HEAD).to(weights.embed.dtype)
    if not head.equal(weights.embed.cpu()):
        raise TensorMismatchError(
            f"{stored.path}: tensor {LM_HEAD} differs from {EMBED} although config.json "
            f"ties them; set tie_word_embeddings to false"
        )


def shards(folder: Path) -> Iterator[tuple[Path, set[str] | None]]:
    """Yield each safetensors file and the tensors the index expects in it (None: no
    index).
    """
    index, single = folder / INDEX_NAME, folder / SINGLE_NAME
    if index.is_file():
        yield from _indexed(folder, index)
    elif single.is_file():
        yield single, None
    else:
        raise _no_weights(folder, single)


def _no_weights(folder: Path, single: Path) -> CheckpointError:
    """What to raise for a folder without safetensors."""
    files = sorted(folder.glob("*"))
    pickles = [path.name for path in files if path.suffix in (".bin", ".pt", ".pth")]
    if pickles:
        return UnsupportedModelError(
            f"{folder}: holds {pickles[0]} but no safetensors; pickled weights can "
            f"execute code and are never read: convert them with transformers' "
            f"save_pretrained"
        )
    remedy = "download the weights, or use --load-format dummy for random ones"
    return _damaged(single, f"not found (nor {INDEX_NAME})", remedy)


def _indexed(folder: Path, index: Path) -> Iterator[tuple[Path, set[str]]]:
    """The files that an index names, and the tensors in each."""
    weight_map = read_optional(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise _damaged(index, "weight_map must map tensor names to files")
    by_file: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        # An index must not reach out of its own folder.
        inside = isinstance(file, str) and file == Path(file).name
        if not inside or file in ("", ".", ".."):
            what = f"{file!r}, which is not the name of a file in this folder"
            raise _damaged(index, f"tensor {name} is said to be in {what}")
        by_file.setdefault(file, set()).add(name)
    for file, names in sorted(by_file.items()):
        if not (folder / file).is_file():
            what = f"not found, but {INDEX_NAME} says it holds {len(names)} tensors"
            raise _damaged(folder / file, what, "download it")
        yield folder / file, names


def _check_shard(
    path: Path, names: set[str] | None, found: list[str], earlier: Found
) -> None:
    if twice := [name for name in found if name in earlier]:
        what = f"holds {_list(twice)}, which {earlier[twice[0]].path.name} holds as well"
        raise _damaged(path, what, "download both again")
    if names is not None and names != set(found):
        lacking, surplus = sorted(names - set(found)), sorted(set(found) - names)
        what = f"lacks {_list(lacking)}" if lacking else f"holds {_list(surplus)}"
        raise _damaged(
            path, f"{what}, other than {INDEX_NAME} says", "download both again"
        )


def _check_tensors(spec: ModelSpec, where: Found, folder: Path) -> None:
    """Compare names, shapes and types with the spec, reading headers only."""
    blank = named_parts(spec, empty_weights(spec, "float32", "meta"))
    expected = {name: tuple(part.shape) for name, part in blank}
    if missing := [name for name in expected if name not in where]:
        raise TensorMismatchError(
            f"{folder}: missing tensor {_list(missing)} (shape "
            f"{list(expected[missing[0]])}); the checkpoint is incomplete or its "
            f"config.json describes another model"
        )
    if spec.tie_word_embeddings and LM_HEAD in where:
        expected[LM_HEAD] = expected[EMBED]
    surplus = (name for name in where if name not in expected)
    if extra := [name for name in surplus if not name.endswith(HARMLESS)]:
        raise TensorMismatchError(
            f"{where[extra[0]].path}: unexpected tensor {_list(sorted(extra))}; the "
            f"checkpoint has parts that {spec.family.architecture} with this config.json "
            f"does not have"
        )
    for name, shape in expected.items():
        _check_header(name, shape, where[name])


def _check_header(name: str, shape: tuple[int, ...], place: Place) -> None:
    """Compare a tensor's shape and type with what they should be."""
    header = place.file.get_slice(name)
    if (found := tuple(header.get_shape())) != shape:
        raise TensorMismatchError(
            f"{place.path}: tensor {name} has shape {list(found)}, expected "
            f"{list(shape)} by config.json; use the config.json that belongs to these "
            f"weights"
        )
    if (kind := header.get_dtype()) not in FLOAT_DTYPES:
        raise UnsupportedModelError(
            f"{place.path}: tensor {name} has type {kind}, expected one of "
            f"{', '.join(FLOAT_DTYPES)}; quantized weights are not supported yet"
        )


def _list(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more

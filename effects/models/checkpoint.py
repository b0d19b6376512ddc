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
Found = dict[str, tuple[Path, Any]]  # tensor name -> path and open file that hold it


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
        what = (
            "a model is a Hugging Face checkpoint folder with config.json, "
            "safetensors "
            "weights"
        )
        raise ConfigError(f"{path}: not found; {what} and tokenizer.json")
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
            where.update((name, (path, file)) for name in found)
        _check_tensors(spec, where, Path(folder))
        weights = empty_weights(spec, dtype or spec.dtype, device)
        if device == "cpu":
            for name, target in named_parts(spec, weights):
                target.copy_(where[name][1].get_tensor(name))
        else:
            from minfer.effects.models.stream_weights import stream_weights

            stream_weights(
                [(where[name][0], name, t) for name, t in named_parts(spec, weights)]
            )
        if spec.tie_word_embeddings and LM_HEAD in where:
            # A stored output head beside tied embeddings is a copy, or the config is
            # wrong.
            path, file = where[LM_HEAD]
            if (
                not file.get_tensor(LM_HEAD)
                .to(weights.embed.dtype)
                .equal(weights.embed.cpu())
            ):
                what = (
                    f"tensor {LM_HEAD} differs from {EMBED} although config.json "
                    f"ties them"
                )
                raise TensorMismatchError(
                    f"{path}: {what}; set tie_word_embeddings to false"
                )
    return weights


def shards(folder: Path) -> Iterator[tuple[Path, set[str] | None]]:
    """Yield each safetensors file and the tensors the index expects in it (None: no
    index).
    """
    index, single = folder / INDEX_NAME, folder / SINGLE_NAME
    if not index.is_file() and not single.is_file():
        pickles = sorted(
            p.name for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".pth")
        )
        if pickles:
            what = (
                f"{folder}: holds {pickles[0]} but no safetensors; pickled weights "
                f"can execute"
            )
            remedy = "convert them with transformers' save_pretrained"
            raise UnsupportedModelError(f"{what} code and are never read: {remedy}")
        remedy = "download the weights, or use --load-format dummy for random ones"
        raise _damaged(single, f"not found (nor {INDEX_NAME})", remedy)
    if not index.is_file():
        yield single, None
        return
    weight_map = read_optional(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise _damaged(index, "weight_map must map tensor names to files")
    by_file: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        # An index must not reach out of its own folder.
        if (
            not isinstance(file, str)
            or file != Path(file).name
            or file in ("", ".", "..")
        ):
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
        what = f"holds {_list(twice)}, which {earlier[twice[0]][0].name} holds as well"
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
        what = f"missing tensor {_list(missing)} (shape {list(expected[missing[0]])})"
        why = "the checkpoint is incomplete or its config.json describes another model"
        raise TensorMismatchError(f"{folder}: {what}; {why}")
    if spec.tie_word_embeddings and LM_HEAD in where:
        expected[LM_HEAD] = expected[EMBED]
    if extra := [
        name for name in where if name not in expected and not name.endswith(HARMLESS)
    ]:
        what = (
            f"{where[extra[0]][0]}: unexpected tensor {_list(sorted(extra))}; the "
            f"checkpoint "
            f"has"
        )
        family = spec.family.architecture
        raise TensorMismatchError(
            f"{what} parts that {family} with this config.json does not have"
        )
    for name, shape in expected.items():
        path, file = where[name]
        header = file.get_slice(name)
        if (found := tuple(header.get_shape())) != shape:
            what = (
                f"tensor {name} has shape {list(found)}, expected {list(shape)} by "
                f"config.json"
            )
            remedy = "use the config.json that belongs to these weights"
            raise TensorMismatchError(f"{path}: {what}; {remedy}")
        if (kind := header.get_dtype()) not in FLOAT_DTYPES:
            what = (
                f"tensor {name} has type {kind}, expected one of "
                f"{', '.join(FLOAT_DTYPES)}"
            )
            raise UnsupportedModelError(
                f"{path}: {what}; quantized weights are not supported yet"
            )


def _list(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more

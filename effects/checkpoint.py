"""Reads a Hugging Face checkpoint folder: config.json and safetensors, nothing that can execute.

Every tensor is checked against the spec before any is copied, so that a damaged checkpoint fails
in milliseconds with the names of what is wrong. torch is imported only where tensors are made.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minfer.effects.spec import (
    CheckpointError,
    ConfigError,
    ModelSpec,
    UnsupportedModelError,
    expected_tensors,
    parse_spec,
)
from minfer.effects.weights import Weights, empty_weights, named_parts, random_weights

if TYPE_CHECKING:
    import torch

__all__ = [
    "CheckpointError",
    "ConfigError",
    "CorruptFileError",
    "TensorMismatchError",
    "UnsupportedModelError",
    "load_weights",
    "random_weights",
    "read_config",
    "read_json",
    "read_spec",
]

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
FLOAT_DTYPES = {"F64", "F32", "BF16", "F16"}
# Buffers that old versions of transformers wrote although they are computed, not learnt.
HARMLESS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
NAMED = 4  # how many names of a kind an error lists


class CorruptFileError(CheckpointError):
    """A file of the checkpoint is missing, truncated or not what its name says."""


class TensorMismatchError(CheckpointError):
    """Tensors are missing, unexpected, or of another shape or type than the config implies."""


def read_optional(path: Path) -> dict[str, Any]:
    """Read a JSON object; {} if there is no such file. Raises as `read_json` does."""
    return read_json(path) if path.is_file() else {}


def eos_ids(folder: Path) -> tuple[int, ...]:
    """Ids that end a sequence, of generation_config.json and config.json where they name any."""
    ids: list[Any] = []
    for name in ("generation_config.json", "config.json"):
        value = read_optional(folder / name).get("eos_token_id")
        ids += value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(token for token in ids if type(token) is int))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises `CorruptFileError` if it is not one (or cannot be read)."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptFileError(
            f"{path}: cannot be read as JSON ({error}); download it again"
        ) from error
    if not isinstance(value, dict):
        raise CorruptFileError(
            f"{path}: must be a JSON object, found {type(value).__name__}; download it again"
        )
    return value


def read_config(folder: str | Path) -> dict[str, Any]:
    """The contents of a checkpoint folder's config.json. Raises `ConfigError`."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"{path}: not found; a model is a Hugging Face checkpoint folder with "
            "config.json, safetensors weights and tokenizer.json"
        )
    try:
        return read_json(path)
    except CorruptFileError as error:
        raise ConfigError(str(error)) from error


def read_spec(folder: str | Path) -> ModelSpec:
    """The `ModelSpec` of a checkpoint folder. Needs config.json only; loads no torch.

    Raises `ConfigError` and `UnsupportedModelError`.
    """
    return parse_spec(read_config(folder), str(Path(folder) / "config.json"))


def load_weights(
    folder: str | Path,
    spec: ModelSpec,
    dtype: str | None = None,
    device: "torch.device | str" = "cpu",
) -> Weights:
    """Load, check, cast and fuse a checkpoint's weights.

    `dtype` is "float32", "bfloat16" or "float16" (the config's own when None). Raises
    `CorruptFileError` for damaged or missing files, `TensorMismatchError` for missing, unexpected
    or misshapen tensors, `UnsupportedModelError` for a dtype or format that is not supported.
    """
    from safetensors import SafetensorError, safe_open

    with ExitStack() as stack:
        where: dict[str, tuple[Path, Any]] = {}  # tensor name -> file that holds it
        for path, names in shards(Path(folder)):
            try:
                file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
                found = list(file.keys())
            except (SafetensorError, OSError) as error:
                raise CorruptFileError(
                    f"{path}: truncated or corrupt ({error}); download it again"
                ) from error
            _check_shard(path, names, found, where)
            where.update((name, (path, file)) for name in found)
        _check_tensors(spec, where, Path(folder))
        weights = empty_weights(spec, dtype or spec.dtype, device)
        for name, target in named_parts(spec, weights):
            target.copy_(where[name][1].get_tensor(name))
        _check_tied(spec, where, weights)
    return weights


def shards(folder: Path) -> Iterator[tuple[Path, set[str] | None]]:
    """Yield each safetensors file and the tensors the index expects in it (None: no index)."""
    index = folder / INDEX_NAME
    if not index.is_file():
        if not (folder / SINGLE_NAME).is_file():
            raise _no_weights(folder)
        yield folder / SINGLE_NAME, None
        return
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptFileError(
            f"{index}: weight_map must map tensor names to files; download it again"
        )
    by_file: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        # An index must not reach out of its own folder.
        if not isinstance(file, str) or file != Path(file).name or file in ("", ".", ".."):
            raise CorruptFileError(
                f"{index}: tensor {name} is said to be in {file!r}, which is not"
                " the name of a file in this folder; download it again"
            )
        by_file.setdefault(file, set()).add(name)
    for file, names in sorted(by_file.items()):
        if not (folder / file).is_file():
            raise CorruptFileError(
                f"{folder / file}: not found, but {INDEX_NAME} says it holds "
                f"{len(names)} tensors; download it"
            )
        yield folder / file, names


def _no_weights(folder: Path) -> CheckpointError:
    pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
    if pickles:
        return UnsupportedModelError(
            f"{folder}: holds {pickles[0]} but no safetensors; pickled weights can execute code and"
            " are never read: convert them with transformers' save_pretrained"
        )
    return CorruptFileError(
        f"{folder / SINGLE_NAME}: not found (nor {INDEX_NAME}); download the "
        "weights, or use --load-format dummy for random ones"
    )


def _check_shard(
    path: Path, names: set[str] | None, found: list[str], earlier: Mapping[str, Any]
) -> None:
    twice = [name for name in found if name in earlier]
    if twice:
        raise CorruptFileError(
            f"{path}: holds {_list(twice)}, which {earlier[twice[0]][0].name} "
            "holds as well; download both again"
        )
    if names is not None and names != set(found):
        lacking, surplus = sorted(names - set(found)), sorted(set(found) - names)
        what = f"lacks {_list(lacking)}" if lacking else f"holds {_list(surplus)}"
        what += f", other than {INDEX_NAME} says"
        raise CorruptFileError(f"{path}: {what}; download both again")


def _check_tensors(spec: ModelSpec, where: Mapping[str, tuple[Path, Any]], folder: Path) -> None:
    """Compare names, shapes and types with the spec, reading headers only."""
    expected = dict(expected_tensors(spec))
    missing = [name for name in expected if name not in where]
    if missing:
        raise TensorMismatchError(
            f"{folder}: missing tensor {_list(missing)} (shape {list(expected[missing[0]])}); the "
            "checkpoint is incomplete or its config.json describes another model"
        )
    if spec.tie_word_embeddings and spec.family.names["lm_head"] in where:
        expected[spec.family.names["lm_head"]] = expected[spec.family.names["embed"]]
    extra = [name for name in where if name not in expected and not name.endswith(HARMLESS)]
    if extra:
        raise TensorMismatchError(
            f"{where[extra[0]][0]}: unexpected tensor {_list(sorted(extra))}; the checkpoint has "
            f"parts that {spec.family.architecture} with this config.json does not have"
        )
    for name, shape in expected.items():
        path, file = where[name]
        header = file.get_slice(name)
        if tuple(header.get_shape()) != shape:
            raise TensorMismatchError(
                f"{path}: tensor {name} has shape {list(header.get_shape())}, expected "
                f"{list(shape)} by config.json; use the config.json that belongs to these weights"
            )
        if header.get_dtype() not in FLOAT_DTYPES:
            raise UnsupportedModelError(
                f"{path}: tensor {name} has type {header.get_dtype()}, expected one of "
                f"{', '.join(sorted(FLOAT_DTYPES))}; quantized weights are not supported yet"
            )


def _check_tied(spec: ModelSpec, where: Mapping[str, tuple[Path, Any]], weights: Weights) -> None:
    """A stored output head beside tied embeddings is a copy; if it is not, the config is wrong."""
    name = spec.family.names["lm_head"]
    if spec.tie_word_embeddings and name in where:
        path, file = where[name]
        head = file.get_tensor(name).to(weights.embed.dtype)
        if not head.equal(weights.embed.cpu()):
            raise TensorMismatchError(
                f"{path}: tensor {name} differs from {spec.family.names['embed']} although "
                "config.json ties them; set tie_word_embeddings to false"
            )


def _list(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more

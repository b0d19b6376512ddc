"""Finds the file of each tensor of a checkpoint, as transformers does.

`model.safetensors` is read if it exists, else the files that
`model.safetensors.index.json` names, and of each file every tensor, listed or not. Two
cases in which transformers chooses silently are refused: a `model.safetensors` beside the
complete files of an index, and a tensor that two files hold with different values.
A GGUF file is a checkpoint of one file.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import Any, Final

from attrs import field, frozen

from minfer.effects.models.config_reader import CheckpointError, UnsupportedModelError
from minfer.effects.models.gguf.container import is_gguf, read_gguf
from minfer.effects.models.gguf.tensors import GgufTensors, open_gguf_tensors
from minfer.effects.models.json_files import damaged, read_optional
from minfer.effects.models.layout.rank_parts import Cut

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
SUFFIX: Final = ".safetensors"
# Of peft; and of Mistral's own form.
ADAPTERS: Final = (
    "adapter_model.safetensors",
    "adapter_config.json",
    "adapter_model.bin",
)
CONSOLIDATED: Final = "consolidated"
# transformers 5's config field that names another file than these.
WEIGHTS_FILE_KEY: Final = "transformers_weights"
_log = logging.getLogger("minfer.weights")
_NAME_IT: Final = (
    "name it with --enable-lora --lora-modules NAME=FOLDER, or in Python with "
    "lora_request"
)
MAX_LISTED_NAMES: Final = 4  # how many names an error lists


@frozen(eq=False)
class TensorPlace:
    """Where a tensor is."""

    path: Path
    file: Any  # open; safetensors ships no types
    name: str  # in the file

    def tensor(self, cut: Cut | None = None) -> Any:
        """Returns the tensor, or a part of it, read from the file."""
        if cut is None:
            return self.file.get_tensor(self.name)
        stored = self.file.get_slice(self.name)
        if isinstance(self.file, GgufTensors):  # which dequantizes all of it
            stored = self.file.get_tensor(self.name)
        return cut.apply(stored)


@frozen(eq=False)
class FoundTensors:
    """The tensors of a checkpoint by their names in the files."""

    places: Mapping[str, TensorPlace]
    # The file in which the index lists a tensor; None: there is no index.
    listed: Mapping[str, Path] | None = field(default=None)
    # Whether stream_weights.py can read the files.
    streams: bool = True

    def is_listed(self, name: str) -> bool:
        """Returns whether the index lists a tensor, or there is no index."""
        return self.listed is None or name in self.listed


def list_names(names: list[str]) -> str:
    """Returns the first of these names, and how many more there are."""
    suffix = (
        f" and {len(names) - MAX_LISTED_NAMES} more"
        if len(names) > MAX_LISTED_NAMES
        else ""
    )
    return ", ".join(names[:MAX_LISTED_NAMES]) + suffix


def shards(folder: Path) -> Iterator[tuple[Path, set[str] | None]]:
    """Yield each weight file and the tensors the index lists in it (None: no index); a
    GGUF file is in the place of its folder.

    Raises `CorruptFileError`, and `UnsupportedModelError` for pickles.
    """
    if is_gguf(folder):
        yield folder, None
        return
    index, single = folder / INDEX_NAME, folder / SINGLE_NAME
    explicit = read_optional(folder / "config.json").get(WEIGHTS_FILE_KEY)
    if isinstance(explicit, str):
        single = _path_inside(
            folder, explicit, f"{folder / 'config.json'}: {WEIGHTS_FILE_KEY}"
        )
        if single.name.endswith(".index.json"):
            index, single = single, folder / ""
    elif single.is_file() and index.is_file():
        _check_beside(folder, single, index)
    if single.is_file():
        yield single, None
    elif index.is_file():
        yield from _indexed_files(folder, index)
    else:
        raise _no_weights(folder, single)


def find_tensors(
    folder: Path, stack: ExitStack, dtype: str = "float32", device: str = "cpu"
) -> FoundTensors:
    """Open the files of a checkpoint, on `stack`, and find its tensors. Those of a GGUF
    file are dequantized to `dtype`, on `device`.

    Raises `CheckpointError` as `shards`, and for damaged files.
    """
    if is_gguf(folder):
        file = open_gguf_tensors(read_gguf(folder), dtype, device)
        names = file.keys()
        in_file = {name: TensorPlace(folder, file, name) for name in names}
        return FoundTensors(in_file, streams=False)
    from safetensors import SafetensorError, safe_open

    places: dict[str, TensorPlace] = {}
    listed: dict[str, Path] | None = None
    for path, names in shards(folder):
        try:
            file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            file_places = [TensorPlace(path, file, name) for name in file.keys()]  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise damaged(path, f"truncated or corrupt ({error})") from error
        for place in file_places:
            if (earlier := places.get(place.name)) is not None:
                check_same(earlier, place)
            places[place.name] = place
        if names is not None:
            listed = (listed or {}) | dict.fromkeys(names, path)
    return FoundTensors(places, listed)


def check_same(place: TensorPlace, other_place: TensorPlace) -> None:
    """Raise `CheckpointError` for two places of a tensor with different values."""
    tensor, other_tensor = place.tensor(), other_place.tensor()
    if tensor.dtype != other_tensor.dtype or not tensor.equal(other_tensor):
        raise CheckpointError(
            f"{other_place.path}: tensor {other_place.name} differs from {place.name} of "
            f"{place.path.name}, which is the same tensor of the model; remove the wrong "
            f"one of the two"
        )


def _check_beside(folder: Path, single: Path, index: Path) -> None:
    """Refuse a model.safetensors beside the complete other files of an index, and warn of
    one beside an unusable index.
    """
    try:
        files = {path for path, _ in _indexed_files(folder, index)}
    except CheckpointError as error:
        _log.warning("%s is read, and not %s: %s", single, index.name, error)
        return
    if files != {single}:
        names = list_names(sorted(str(path.relative_to(folder)) for path in files))
        raise CheckpointError(
            f"{folder}: holds both {SINGLE_NAME} and {INDEX_NAME} with all its files "
            f"({names}); which weights are meant is unknown: remove one of the two"
        )


def adapter_in(folder: Path) -> str | None:
    """Returns the name of an adapter's file in a folder; None: there is none."""
    return next((name for name in ADAPTERS if (folder / name).is_file()), None)


def warn_of_adapter(folder: Path) -> None:
    """Warn of an adapter beside a model's weights, which is not used."""
    if (adapter := adapter_in(folder)) is not None:
        fault = "the adapter beside the weights is not used as a part of the model"
        _log.warning("%s: %s; %s", folder / adapter, fault, _NAME_IT)


def no_model(folder: Path) -> str | None:
    """Returns why a folder's files are no model that minfer reads, if their names show
    it.
    """
    if (adapter := adapter_in(folder)) is not None:
        return (
            f"{folder}: holds an adapter ({adapter}), which is a part of a model; give "
            f"its base model, and {_NAME_IT}"
        )
    for path in sorted(folder.glob(f"{CONSOLIDATED}*{SUFFIX}")):
        return (
            f"{folder}: holds {path.name}, which is in Mistral's own form, with other "
            f"names of tensors; use a checkpoint in Hugging Face's form "
            f"({SINGLE_NAME}, or {INDEX_NAME} and its files)"
        )
    return None


def _no_weights(folder: Path, single: Path) -> CheckpointError:
    """Returns the error about a folder without safetensors, or with others."""
    if reason := no_model(folder):
        return UnsupportedModelError(reason)
    files = sorted(path.name for path in folder.glob("*"))
    other_names = [name for name in files if name.endswith(SUFFIX)]
    if other_names:
        fault = f"not found (nor {INDEX_NAME}), but {list_names(other_names)}"
        rename = f"rename {other_names[0]} to {SINGLE_NAME}"
        remedy = rename if len(other_names) == 1 else f"download {INDEX_NAME} as well"
        return damaged(single, fault, remedy)
    pickles = [name for name in files if Path(name).suffix in (".bin", ".pt", ".pth")]
    if pickles:
        return UnsupportedModelError(
            f"{folder}: holds {pickles[0]} but no safetensors; pickled weights can "
            f"execute code and are never read: convert them with transformers' "
            f"save_pretrained"
        )
    remedy = "download the weights, or use --load-format dummy for random ones"
    return damaged(single, f"not found (nor {INDEX_NAME})", remedy)


def _path_inside(folder: Path, name: object, label: str) -> Path:
    """Returns the path of a file of the folder, or of a subfolder, by its name."""
    path_parts = PurePosixPath(name).parts if isinstance(name, str) else ()
    outside = (
        not path_parts or path_parts[0] == "/" or ".." in path_parts or "\\" in str(name)
    )
    if outside:
        raise damaged(
            folder, f"{label} is {name!r}, not the name of a file in this folder"
        )
    return folder.joinpath(*path_parts)


def _indexed_files(folder: Path, index: Path) -> Iterator[tuple[Path, set[str]]]:
    """Yields the files that an index names, and the tensors in each."""
    weight_map = read_optional(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise damaged(index, "weight_map must map tensor names to files")
    by_file: dict[Path, set[str]] = {}
    for name, file in weight_map.items():
        path = _path_inside(folder, file, f"{index.name}: the file of tensor {name}")
        if path.suffix != SUFFIX:
            fault = f"tensor {name} is said to be in {file!r}, which is no safetensors"
            raise UnsupportedModelError(f"{index}: {fault}; convert it with transformers")
        by_file.setdefault(path, set()).add(name)
    for path, names in sorted(by_file.items()):
        if not path.is_file():
            fault = f"not found, but {index.name} says it holds {len(names)} tensors"
            raise damaged(path, fault, "download it")
        yield path, names

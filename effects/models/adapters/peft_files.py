"""Reads the tensors of a PEFT checkpoint, and checks them against a model.

Theory. peft stores A [rank, inputs] and B [outputs, rank] of each module it changes,
`base_model.model.NAME.lora_A.weight` and `...lora_B.weight`. Of a parameter that has the
matrices of all experts, A is [experts * rank, inputs], of one expert after another, and B
[outputs, rank * experts], of one rank after another; the module is that of the experts,
and a second parameter of it is at `NAME.base_layer`: shapes show which is which.

safetensors alone are read: a pickle can execute code.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from minfer.effects.models.adapters.adapter_parts import (
    SUFFIX,
    AdapterPart,
    layout_parts,
)
from minfer.effects.models.adapters.peft_config import (
    AdapterError,
    PeftConfig,
    read_peft_config,
)
from minfer.effects.models.architecture.spec import ModelSpec, layer_prefix
from minfer.effects.models.checkpoint.tensor_names import model_name
from minfer.effects.models.parts import FLOATS

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS_NAME: Final = "adapter_model.safetensors"
PICKLE_NAME: Final = "adapter_model.bin"
ROOT: Final = "base_model.model."
BASE_LAYER: Final = ".base_layer"
KINDS: Final = ("lora_A", "lora_B")
MAX_NAME_CHARS: Final = 512  # of a tensor; searching longer names could take for ever
_MAX_ERROR_CHARS: Final = 200  # of the reader of files, in an error
_EXPERTS: Final = re.compile(r"(?:^|\.)layers\.(\d+)\..*experts$")
_MERGE: Final = "merge the adapter into its base model (in peft, merge_and_unload)"


@frozen(eq=False)
class StoredPair:
    """A and B of a module, as a file has them."""

    lora_a: "Tensor"  # [rank, inputs] or [experts * rank, inputs]
    lora_b: "Tensor"  # [outputs, rank] or [outputs, rank * experts]


@frozen(eq=False)
class LoraWeights:
    """The matrices of an adapter that change one matrix of a model, or those of all its
    experts: W + scaling * lora_b @ lora_a.
    """

    lora_a: "Tensor"  # [rank, inputs] or [experts, rank, inputs]
    lora_b: "Tensor"  # [outputs, rank] or [experts, outputs, rank]
    scaling: float

    @property
    def rank(self) -> int:
        """Rows of A."""
        return int(self.lora_a.shape[-2])

    @property
    def bytes(self) -> int:
        """Bytes of both, as they are stored."""
        return int(self.lora_a.nbytes + self.lora_b.nbytes)


@frozen(eq=False)
class Adapter:
    """An adapter in host memory, that fits a model."""

    folder: Path
    digest: bytes  # of all that decides what it computes
    matrices: Mapping[str, LoraWeights]  # by the names of a checkpoint's matrices
    base_model: str | None  # which it was made for, as its config says

    @property
    def rank(self) -> int:
        """The largest rank."""
        return max(factors.rank for factors in self.matrices.values())

    @property
    def bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(factors.bytes for factors in self.matrices.values())


def read_adapter(folder: Path, spec: ModelSpec, max_rank: int) -> Adapter:
    """Read an adapter for a model, whose sizes `spec` has, not those of a rank.

    Raises `AdapterError` for what does not fit the model or `max_rank`, or is not
    supported; `CorruptFileError` for damaged files.
    """
    check_model(spec)
    config, path = read_peft_config(folder), folder / WEIGHTS_NAME
    parts = layout_parts(spec, 1)
    matrices: dict[str, LoraWeights] = {}
    finder = PartFinder(path, spec, parts)
    for module, pair in _read_pairs(folder, len(KINDS) * len(parts)).items():
        part = finder.part_of(module, pair)
        if part.name in matrices:
            raise AdapterError(
                f"{path}: two pairs of tensors are of {part.name}, one of them {module}; "
                f"write the adapter again with peft"
            )
        matrices[part.name] = _lora_weights(config, path, module, part, pair)
    ranks = {name: factors.rank for name, factors in matrices.items()}
    largest = max(ranks, key=lambda name: ranks[name])
    if ranks[largest] > max_rank:
        raise AdapterError(
            f"{folder}: {largest} has rank {ranks[largest]}, and at most {max_rank} is "
            f"allowed; raise max_lora_rank (--max-lora-rank)"
        )
    return Adapter(folder, _digest(matrices), matrices, config.base_model)


def check_model(spec: ModelSpec) -> None:
    """Raise `AdapterError` for a model without adapters."""
    if spec.parameters:
        raise AdapterError(
            f"{spec.family.architecture} runs as transformers' own model, which cannot "
            f"have adapters here; {_MERGE}"
        )


def _read_pairs(folder: Path, max_tensors: int) -> dict[str, StoredPair]:
    """Returns A and B by the names of modules. Raises `AdapterError` for a tensor that is
    neither, or without the other, and for more tensors than a model takes.
    """
    path = folder / WEIGHTS_NAME
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in _read_tensors(folder, max_tensors):
        module, _, kind = name.removesuffix(".weight").rpartition(".")
        if kind not in KINDS or not name.endswith(".weight"):
            raise AdapterError(
                f"{path}: tensor {name} is not one of {' and '.join(KINDS)}; only LoRA's "
                f"low-rank matrices are supported: {_MERGE}"
            )
        halves.setdefault(module.removeprefix(ROOT), {})[kind] = tensor
    if not halves:
        raise AdapterError(f"{path}: holds no tensors; write the adapter again with peft")
    for module, found in halves.items():
        if missing := [kind for kind in KINDS if kind not in found]:
            raise AdapterError(
                f"{path}: {module} has no {missing[0]}; write the adapter again with peft"
            )
    return {
        module: StoredPair(*(found[kind] for kind in KINDS))
        for module, found in halves.items()
    }


def _read_tensors(folder: Path, max_tensors: int) -> Iterator[tuple[str, "Tensor"]]:
    """Yields the tensors of the file by name. Raises `AdapterError` for what is no matrix
    of finite numbers.
    """
    from safetensors import SafetensorError, safe_open

    path = folder / WEIGHTS_NAME
    if not path.is_file():
        pickle = (folder / PICKLE_NAME).is_file()
        fault = f"holds {PICKLE_NAME} but no {WEIGHTS_NAME}" if pickle else "not found"
        remedy = (
            "pickled weights can execute code and are never read: convert it with peft's "
            "save_pretrained"
            if pickle
            else "give the folder that peft's save_pretrained wrote"
        )
        raise AdapterError(f"{folder if pickle else path}: {fault}; {remedy}")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            names = list(file.keys())
            _check_names(path, names, max_tensors)
            for name in names:
                _check_form(path, name, file.get_slice(name))
                yield name, _checked(path, name, file.get_tensor(name))
    except (SafetensorError, OSError) as error:
        reason = str(error)[:_MAX_ERROR_CHARS]
        raise AdapterError(
            f"{path}: truncated or corrupt ({reason}); download it again"
        ) from error


def _check_names(path: Path, names: Sequence[str], max_tensors: int) -> None:
    """Raise `AdapterError` for more tensors than a model takes, and long names, before
    any is read.
    """
    if len(names) > max_tensors:
        raise AdapterError(
            f"{path}: has {len(names)} tensors, and this model takes at most "
            f"{max_tensors}; use the adapter's own base model"
        )
    for name in names:
        if len(name) > MAX_NAME_CHARS:
            raise AdapterError(
                f"{path}: tensor {name[:_MAX_ERROR_CHARS]}... has a name of {len(name)} "
                f"characters; at most {MAX_NAME_CHARS} are read"
            )


def _check_form(path: Path, name: str, tensor: Any) -> None:
    """Raise `AdapterError` for a tensor, not yet read, that is no matrix of floats."""
    if (kind := tensor.get_dtype()) not in FLOATS:
        raise AdapterError(
            f"{path}: tensor {name} is of type {kind}; one of {', '.join(FLOATS)} is "
            f"supported"
        )
    shape = tensor.get_shape()
    if len(shape) != 2 or 0 in shape:
        raise AdapterError(
            f"{path}: tensor {name} has shape {str(shape)[:_MAX_ERROR_CHARS]}, and must "
            f"be a matrix; write the adapter again with peft"
        )


def _checked(path: Path, name: str, tensor: Any) -> "Tensor":
    if not tensor.isfinite().all():
        raise AdapterError(
            f"{path}: tensor {name} has numbers that are NaN or infinite; train the "
            f"adapter again, or download it again"
        )
    checked: Tensor = tensor
    return checked


class PartFinder:
    """Finds the matrix of a model that a module's tensors change."""

    def __init__(
        self, path: Path, spec: ModelSpec, parts: Mapping[str, AdapterPart]
    ) -> None:
        self._path, self._spec, self._parts = path, spec, parts
        self._names = {name + SUFFIX for name in parts}

    def part_of(self, module: str, pair: StoredPair) -> AdapterPart:
        """Returns the matrix. Raises `AdapterError` if the model has none such."""
        plain_name = module
        while plain_name.endswith(BASE_LAYER):
            plain_name = plain_name.removesuffix(BASE_LAYER)
        if found := _EXPERTS.search(plain_name):
            return self._stacked_part(layer_prefix(int(found[1])), module, pair)
        name = model_name(self._spec, plain_name + SUFFIX, self._names)
        part = self._parts.get(name.removesuffix(SUFFIX))
        if part is None:
            raise AdapterError(
                f"{self._path}: the model ({self._spec.family.architecture}) has no "
                f"matrix {plain_name} that an adapter can change: those of its layers' "
                f"products can be changed, but embeddings, output head, routers and "
                f"kv_b_proj (MLA); use the adapter's own base model, or {_MERGE}"
            )
        return part

    def _stacked_part(self, layer: str, module: str, pair: StoredPair) -> AdapterPart:
        """Returns the matrix of all experts of a layer that has the shapes of a pair."""
        sizes = int(pair.lora_a.shape[1]), int(pair.lora_b.shape[0])
        stacked = [
            part
            for name, part in self._parts.items()
            if name.startswith(layer) and part.is_stacked
        ]
        for part in stacked:
            if (part.inputs, part.outputs) == sizes:
                return part
        known = " and ".join(
            f"{part.name} ({part.inputs} inputs, {part.outputs} outputs)"
            for part in stacked
        )
        raise AdapterError(
            f"{self._path}: {module} has {sizes[0]} inputs and {sizes[1]} outputs, and "
            f"this layer of the model has {known or 'no experts'}; use the adapter's own "
            f"base model"
        )


def _lora_weights(
    config: PeftConfig,
    path: Path,
    module: str,
    part: AdapterPart,
    pair: StoredPair,
) -> LoraWeights:
    """Returns the matrices of a module. Raises `AdapterError` for shapes that are not
    those of the model's matrix and of the config's rank, and for a module that the config
    does not name.
    """
    lora_a, lora_b = pair.lora_a, pair.lora_b
    key = module
    if part.is_stacked:
        key = f"{module.split(BASE_LAYER)[0]}.{part.parameter}"
    is_target = config.targets_parameter if part.is_stacked else config.targets_module
    if not is_target(key):
        raise AdapterError(
            f"{path}: has tensors of {module}, which {config.path.name} does not target, "
            f"so that peft ignores them; correct target_modules, or remove the tensors"
        )
    rank, experts = config.rank_of(key), part.experts
    meant = [rank * experts, part.inputs], [part.outputs, rank * experts]
    if [list(lora_a.shape), list(lora_b.shape)] != [*meant]:
        raise AdapterError(
            f"{path}: {module} has matrices of shapes {list(lora_a.shape)} and "
            f"{list(lora_b.shape)}; for {part.name} of the model and rank {rank} they "
            f"must be {meant[0]} and {meant[1]}; use the adapter's own base model"
        )
    if part.is_stacked:
        lora_a = lora_a.reshape(experts, rank, part.inputs)
        lora_b = lora_b.reshape(part.outputs, rank, experts).permute(2, 0, 1)
    return LoraWeights(lora_a, lora_b, config.scaling_of(key))


def _digest(matrices: Mapping[str, LoraWeights]) -> bytes:
    """Returns the digest of an adapter: of its numbers, and of what they change."""
    import torch

    digest = hashlib.sha256(b"adapter")
    for name, factors in sorted(matrices.items()):
        for tensor in (factors.lora_a, factors.lora_b):
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
        digest.update(f"{factors.scaling!r}".encode())
    return digest.digest()

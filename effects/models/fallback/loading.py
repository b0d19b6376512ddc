"""Loads the weights of a model of transformers strictly, or draws random ones; then
checks the model.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from math import isnan
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from safetensors import SafetensorError
from transformers.utils.import_utils import is_peft_available

from minfer.effects.models.architecture.model import Model
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.checkpoint.checkpoint import (
    HARMLESS_SUFFIXES,
    CorruptFileError,
    TensorMismatchError,
    is_harmless,
)
from minfer.effects.models.checkpoint.weight_files import (
    adapter_in,
    find_tensors,
    list_names,
)
from minfer.effects.models.config_reader import (
    CheckpointError,
    ConfigReader,
    ModelConfigError,
    UnsupportedModelError,
)
from minfer.effects.models.dtypes import torch_dtype
from minfer.effects.models.fallback.classes import HuggingFaceModel, quiet, resolve
from minfer.effects.models.fallback.long_rope import choose_factors
from minfer.effects.models.fallback.paged import PAGED, paged_model
from minfer.effects.models.fallback.quantized import (
    prepare_leaves,
    quantize_modules,
    read_leaves,
)
from minfer.effects.models.fallback.self_check import TOLERANCE, CacheMaker, self_check


@quiet()
def load_fallback(
    folder: Path,
    config: Mapping[str, Any],
    spec: ModelSpec,
    make_cache: CacheMaker,
    seed: int | None = None,
    device: str = "cpu",
) -> Model:
    """Load a model in `spec.dtype`, or draw its weights from `seed`, and check it against
    itself.

    `make_cache` makes the CPU's cache, from a spec, a number of blocks and their size.
    Raises `CorruptFileError`, `TensorMismatchError`, and `UnsupportedModelError` if the
    logits of the paged model differ from those of the same model with its own attention.
    """
    hf_model = resolve(ConfigReader(config, str(folder)))
    options = {"dtype": torch_dtype(spec.dtype), "attn_implementation": PAGED}
    try:
        if seed is None:
            model = _from_files(hf_model, folder, spec, **options)
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = hf_model.model._from_config(hf_model.config, **options)
                quantize_modules(spec, model.requires_grad_(False))
    except (CheckpointError, OSError, MemoryError, torch.OutOfMemoryError):
        raise  # of the files, or of this machine
    except Exception as error:  # each model has its own errors about its config
        fault = f"{hf_model.model.__name__} cannot be made of this config.json"
        raise ModelConfigError(f"{folder}: {fault} ({error!r}); correct it") from error
    model.eval().requires_grad_(False)
    if spec.original_context is not None:
        choose_factors(model, spec.original_context, long=spec.long_factors)
    _refuse_if_wrong(folder, hf_model.model.__name__, spec, model, make_cache)
    model = model.to(device)
    prepare_leaves(model)
    return paged_model(model)


def _refuse_if_wrong(
    folder: Path, name: str, spec: ModelSpec, model: Any, make_cache: CacheMaker
) -> None:
    """Raise `CheckpointError` or `UnsupportedModelError` for a model whose paged logits
    are not its own.
    """
    try:
        error = self_check(evolve(spec, dtype="float32"), model, make_cache)
    except Exception as failure:  # each model has its own errors
        raise CheckpointError(f"{folder}: {name} cannot run: {failure!r}") from failure
    if isnan(error):
        raise CheckpointError(
            f"{folder}: damaged weights: logits are not finite, or all alike"
        )
    if error > TOLERANCE:
        fault = f"its logits differ from those with its own (relative error {error:.2g})"
        raise UnsupportedModelError(
            f"{folder}: {name} is not supported: with paged attention {fault}"
        )


def _from_files(
    hf_model: HuggingFaceModel, folder: Path, spec: ModelSpec, **options: Any
) -> Any:
    """Load with transformers, strictly; quantized matrices by minfer's formats."""
    with ExitStack() as stack:
        found_tensors = find_tensors(folder, stack)  # all there, and no pickles
        stored = read_leaves(spec, found_tensors, folder)
        quantized_model = evolve(hf_model, model=stored.in_class(hf_model.model))
        model, report = _by_transformers(quantized_model, folder, options)
        unexpected = (
            name
            for name in report["unexpected_keys"]
            if found_tensors.is_listed(name) and not stored.has(name)
            if name not in found_tensors.places
            or not is_harmless(name, found_tensors.places[name])
        )
        faults = (("missing", report["missing_keys"]), ("unexpected", unexpected))
        for fault, names in faults:
            if faulty := sorted(
                name for name in names if not name.endswith(HARMLESS_SUFFIXES)
            ):
                raise TensorMismatchError(
                    f"{folder}: {fault} tensor {list_names(faulty)}; the checkpoint is "
                    f"incomplete or its config.json describes another model"
                )
    return model


def _by_transformers(
    hf_model: HuggingFaceModel, folder: Path, options: dict[str, Any]
) -> Any:
    """Returns the model that a class loads, and transformers' report. Raises
    `UnsupportedModelError` for an adapter beside the weights that transformers would use.
    """
    if (adapter := adapter_in(folder)) and is_peft_available():
        raise UnsupportedModelError(
            f"{folder}: holds an adapter ({adapter}) beside the weights, which "
            f"transformers would use, as peft is installed; adapters are not supported "
            f"for models that transformers runs: move it elsewhere"
        )
    options |= {"config": hf_model.config, "use_safetensors": True}
    options |= {"local_files_only": True, "trust_remote_code": False}
    options |= {"output_loading_info": True}
    try:
        return hf_model.model.from_pretrained(folder, **options)
    except (SafetensorError, OSError) as error:
        raise CorruptFileError(
            f"{folder}: weights truncated or corrupt ({error})"
        ) from error
    except (RuntimeError, ValueError) as error:
        raise TensorMismatchError(
            f"{folder}: weights do not fit config.json ({error})"
        ) from error

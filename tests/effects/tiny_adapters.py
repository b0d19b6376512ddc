"""Adapters of tiny models, as peft writes them, and their merging in plain torch."""

import json
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, Final

import torch
from attrs import frozen
from safetensors.torch import save_file
from torch import Tensor

# Modules that adapters do not change here.
UNCHANGED: Final = ("lm_head", "kv_b_proj", "shared_expert_gate", "router", "gate.wg")
UNCHANGED_ENDS: Final = ("mlp.gate", "block_sparse_moe.gate", "router.layer")
TRANSPOSED: Final = ("GptOss", "Llama4")  # stacked matrices are [experts, in, out]


@frozen(eq=False)
class Pair:
    """A and B of a module, and what it changes."""

    name: str  # of the parameter
    key: str  # of the module, in a file
    lora_a: Tensor
    lora_b: Tensor
    experts: int = 0


def write_adapter(
    folder: Path,
    model: Any,
    *,
    rank: int = 4,
    seed: int = 0,
    skipped: tuple[str, ...] = (),
    **config: Any,
) -> list[Pair]:
    """Write a random adapter of all products of transformers' `model`."""
    generator = torch.Generator().manual_seed(seed)
    pairs = [
        pair
        for pair in random_pairs(model, rank, generator)
        if not any(part in pair.name for part in skipped)
    ]
    write_pairs(folder, pairs, r=rank, **config)
    return pairs


def write_pairs(folder: Path, pairs: list[Pair], **config: Any) -> None:
    """Write an adapter with these matrices."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for pair in pairs:
        tensors[f"base_model.model.{pair.key}.lora_A.weight"] = pair.lora_a.contiguous()
        tensors[f"base_model.model.{pair.key}.lora_B.weight"] = pair.lora_b.contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    stacked = [pair for pair in pairs if pair.experts]
    values = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": sorted(
            {p.key.rpartition(".")[2] for p in pairs if not p.experts}
        ),
        "target_parameters": sorted({pair.name for pair in stacked}),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(values | config))


def random_pairs(model: Any, rank: int, generator: torch.Generator) -> Iterator[Pair]:
    """Yields random matrices for each product of a model's layers."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(model.dtype) * 0.15

    for name, module in model.named_modules():
        is_changed = not (
            any(part in name for part in UNCHANGED) or name.endswith(UNCHANGED_ENDS)
        )
        in_layer = re.search(r"\.(layers|h)\.\d+\.", name)
        if in_layer and isinstance(module, torch.nn.Linear) and is_changed:
            outputs, inputs = module.weight.shape
            a, b = random(rank, inputs), random(outputs, rank)
            yield Pair(f"{name}.weight", name, a, b)
    is_transposed = type(model).__name__.startswith(TRANSPOSED)
    seen: set[str] = set()
    for name, parameter in model.named_parameters():
        if ".experts." in name and parameter.dim() == 3 and not name.endswith("bias"):
            experts, outputs, inputs = parameter.shape
            if is_transposed:
                outputs, inputs = inputs, outputs
            key = name.rpartition(".")[0]
            key += ".base_layer" * (key in seen)
            seen.add(key)
            a, b = random(rank * experts, inputs), random(outputs, rank * experts)
            yield Pair(name, key, a, b, experts)


def merged(model: Any, pairs: list[Pair], scaling: float | Mapping[str, float]) -> Any:
    """Returns a copy of the model with an adapter's products added to its matrices."""
    copy = deepcopy(model)
    parameters = dict(copy.named_parameters())
    is_transposed = type(model).__name__.startswith(TRANSPOSED)
    for pair in pairs:
        if pair.experts:
            a = pair.lora_a.view(pair.experts, -1, pair.lora_a.shape[1])
            b = pair.lora_b.view(len(pair.lora_b), -1, pair.experts)
            change = torch.einsum("ore,eri->eoi", b, a)
            change = change.mT if is_transposed else change
        else:
            change = pair.lora_b @ pair.lora_a
        factor = scaling if isinstance(scaling, float) else scaling[pair.name]
        with torch.no_grad():
            parameters[pair.name].add_(change, alpha=factor)
    return copy

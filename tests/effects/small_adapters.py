"""Adapters of one matrix a layer, made in a millisecond."""

import json
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

MODULE: Final = "mlp.gate_proj"
WEIGHTS: Final = "adapter_model.safetensors"


def write_adapter(
    folder: Path, model: str | Path, *, seed: int = 0, rank: int = 4, **config: Any
) -> Path:
    """Write an adapter that changes what a model with such a config.json says."""
    sizes = json.loads((Path(model) / "config.json").read_text())
    inputs, outputs = sizes["hidden_size"], sizes["intermediate_size"]
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(sizes["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.{MODULE}"
        for half, shape in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank))):
            matrix = torch.randn(shape, generator=generator)
            tensors[f"{name}.{half}.weight"] = matrix
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS)
    values = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": [MODULE.rpartition(".")[2]],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(values | config))
    return folder

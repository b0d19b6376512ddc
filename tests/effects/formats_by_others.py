"""Checkpoints that llm-compressor writes, beside what compressed-tensors reads in them.

Runs in an environment of its own, which has `llmcompressor` beside minfer. Tiny random
models are quantized by every scheme that minfer reads. Compares each matrix with the
decompressed one, and, where a scheme leaves activations as they are, greedy tokens with
those of transformers' model on the decompressed matrices.
"""

import argparse
import json
import random
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.results import run, show
from minfer.effects.models.architecture import layers
from minfer.effects.models.checkpoint.checkpoint import load_weights
from minfer.effects.models.checkpoint.stored_matrices import as_stored
from minfer.effects.setup.folders import bundled_folder
from minfer.kernels.leaves import Linear
from minfer.kernels.quantized import dequantize
from tests.effects.families import SMALL
from tests.effects.models.formats.test_formats import leaves
from tests.effects.parity import serve_twice, their_tokens
from tests.effects.tiny_families import VARIANTS, save
from tests.effects.tiny_model import read_spec

FAMILIES: Final = (
    ("Llama", "attention_bias"),
    ("Qwen2", "plain"),
    ("Qwen3", "plain"),
    ("Qwen3Moe", "experts"),
)
# Sizes that groups of 128 divide, and several blocks.
SIZES: Final = {
    "hidden_size": 256,
    "head_dim": 64,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
}
TOKENS: Final = 50  # of a continuation
MOE_SIZE: Final = {"moe_intermediate_size": 128}


def _int4(**options: Any) -> Any:
    weights = {"num_bits": 4, "type": "int", **options}
    return {"group_0": {"targets": ["Linear"], "weights": weights}}


SCHEMES: Final[dict[str, Any]] = {
    "W8A8": "W8A8",
    "FP8": "FP8",
    "FP8_DYNAMIC": "FP8_DYNAMIC",
    "FP8_BLOCK": "FP8_BLOCK",
    "W4A16": "W4A16",
    "W4A16_ASYM": "W4A16_ASYM",
    "groups of 32": _int4(strategy="group", group_size=32, symmetric=True),
    "groups of 32, zeros": _int4(strategy="group", group_size=32, symmetric=False),
    "NVFP4": "NVFP4",
    "NVFP4A16": "NVFP4A16",
    "channels": _int4(strategy="channel", symmetric=True),
    "channels, zeros": _int4(strategy="channel", symmetric=False),
}


def write(base: str, target: str, scheme: Any, *, gptq: bool) -> None:
    """Have llm-compressor quantize a checkpoint."""
    # mypy: installed where this runs alone.
    from llmcompressor import oneshot  # type: ignore[import-not-found]
    from llmcompressor.modifiers.quantization import (  # type: ignore[import-not-found]
        GPTQModifier,
        QuantizationModifier,
    )

    make = GPTQModifier if gptq else QuantizationModifier
    options: Any = {"config_groups": scheme}
    if isinstance(scheme, str):
        options = {"targets": "Linear", "scheme": scheme}
    read: Any = transformers.AutoModelForCausalLM.from_pretrained
    model = read(base, dtype=torch.float32)
    rows = torch.randint(0, 160, (8, 1, 24), generator=torch.Generator().manual_seed(1))
    text = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows]
    loader: Any = torch.utils.data.DataLoader
    oneshot(
        model=model,
        recipe=make(ignore=["lm_head", "re:.*gate$"], **options),
        dataset=loader(text, batch_size=None),
        num_calibration_samples=len(text),
        processor=transformers.AutoTokenizer.from_pretrained(bundled_folder()),
    )
    model.save_pretrained(target, save_compressed=True)


def decompress(folder: Path, target: Path) -> None:
    """Write the checkpoint that compressed-tensors makes of a quantized one."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    config = json.loads((folder / "config.json").read_text())
    quantization = config.pop("quantization_config")
    fields = ("config_groups", "quant_method", "format", "ignore")
    groups = QuantizationConfig.model_validate({key: quantization[key] for key in fields})
    scheme = groups.config_groups["group_0"]
    reader = BaseCompressor.get_value_from_registry(quantization["format"])
    modules: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem, _, end = name.rpartition(".")
        modules[stem][end] = tensor
    tensors_out: dict[str, Tensor] = {}
    for stem, tensors in modules.items():
        if "weight_scale" in tensors:
            bias = {end: tensors.pop(end) for end in ("bias",) if end in tensors}
            tensors = {"weight": reader.decompress(tensors, scheme)["weight"], **bias}
        tensors_out |= {
            f"{stem}.{end}": tensor.contiguous() for end, tensor in tensors.items()
        }
    target.mkdir()
    save_file(tensors_out, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_text(json.dumps(config))


def matrices(folder: Path) -> list[Linear]:
    """All leaves that minfer reads."""
    spec = as_stored(read_spec(folder), folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            layers, "in_kernel_layout", lambda leaf: leaf
        )  # leaves stay as they are stored
        return leaves(load_weights(folder, spec, "float32"))


def compare(
    key: tuple[str, str], name: str, prompts: list[list[int]], *, gptq: bool
) -> dict[str, Any]:
    """What differs, of a family and a scheme."""
    with TemporaryDirectory() as place:
        base, quantized, copy = (
            Path(place, folder) for folder in ("base", "made", "copy")
        )
        save(
            str(base),
            key[0],
            VARIANTS[key] | SIZES | (MOE_SIZE if "Moe" in key[0] else {}),
        )
        write(str(base), str(quantized), SCHEMES[name], gptq=gptq)
        decompress(quantized, copy)
        pairs = [*zip(matrices(quantized), matrices(copy), strict=True)]
        figures = {
            "quantized": sum(not leaf.scheme.is_plain for leaf, _ in pairs),
            "largest_difference": max(
                float((dequantize(leaf) - copied.weight).abs().max())
                for leaf, copied in pairs
            ),
        }
        if any(leaf.scheme.activations != "as they are" for leaf, _ in pairs):
            return figures
        passes, _ = serve_twice(str(quantized), prompts, TOKENS, **SMALL)
        read: Any = transformers.AutoModelForCausalLM.from_pretrained
        model = read(copy, dtype=torch.float32)
        expected = [their_tokens(model, [prompt], TOKENS)[0] for prompt in prompts]
        different = sum(
            leaf != copied
            for outputs in passes
            for leaf, copied in zip(outputs, expected, strict=True)
        )
        return {**figures, "sequences": 2 * len(prompts), "different": different}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    draw, rows = random.Random(args.seed), list[dict[str, Any]]()
    lengths = draw.choices(range(1, 61), k=args.prompts)
    prompts = [draw.choices(range(160), k=length) for length in lengths]
    for key in FAMILIES:
        for name in SCHEMES:
            for gptq in (False, True) if name == "W4A16" else (False,):
                figures = compare(key, name, prompts, gptq=gptq)
                writer = "GPTQModifier" if gptq else "QuantizationModifier"
                rows.append(
                    {"family": key[0], "scheme": name, "writer": writer, **figures}
                )
                show(rows[-1])
    packages = ("llmcompressor", "compressed-tensors")
    return {"writers": {package: version(package) for package in packages}, "cases": rows}


if __name__ == "__main__":
    run("formats_by_others", measure, {"--prompts": 8, "--seed": 0})

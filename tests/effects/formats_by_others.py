"""Checkpoints that llm-compressor and NVIDIA's Model Optimizer write, beside what
compressed-tensors and Model Optimizer read in them.

Runs in an environment of its own, which has `llmcompressor` and `nvidia-modelopt` beside
minfer. Tiny random models are quantized by every scheme that minfer reads. Compares each
matrix with the decompressed one, and, where a scheme leaves activations as they are,
greedy tokens with those of transformers' model on the decompressed matrices.
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


MODELOPT: Final = "Model Optimizer: "  # begins the names of its schemes
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
    MODELOPT + "NVFP4": "NVFP4_DEFAULT_CFG",
    MODELOPT + "W4A16_NVFP4": "W4A16_NVFP4_CFG",
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


def write_by_modelopt(base: str, target: str, scheme: str) -> None:
    """Have Model Optimizer quantize a checkpoint."""
    # mypy: installed where this runs alone.
    import modelopt.torch.quantization as mtq  # type: ignore[import-not-found]
    from modelopt.torch.export import (  # type: ignore[import-not-found]
        export_hf_checkpoint,
    )

    read: Any = transformers.AutoModelForCausalLM.from_pretrained
    model = read(base, dtype=torch.float32)
    rows = torch.randint(0, 160, (8, 24), generator=torch.Generator().manual_seed(1))
    quantized = mtq.quantize(
        model, getattr(mtq, scheme), lambda calibrated: calibrated(rows)
    )
    export_hf_checkpoint(quantized, dtype=torch.float32, export_dir=target)


def nvfp4_meant(tensors: dict[str, Tensor], scheme: Any) -> Tensor:
    """What NVFP4 tensors mean in float32, by their writers' own functions."""
    if (packed := tensors.get("weight_packed")) is not None:
        from compressed_tensors.compressors.nvfp4 import unpack_fp4_from_uint8
        from compressed_tensors.quantization.lifecycle.forward import dequantize as meant

        outputs, half = packed.shape
        matrix: Tensor = meant(
            x_q=unpack_fp4_from_uint8(packed, outputs, 2 * half, torch.float32),
            scale=tensors["weight_scale"].float(),
            args=scheme.weights,
            global_scale=tensors["weight_global_scale"],
            dtype=torch.float32,
        )
        return matrix
    from modelopt.torch.quantization.qtensor import (  # type: ignore[import-not-found]
        NVFP4QTensor,
    )

    packed = tensors["weight"]
    shape = torch.Size((len(packed), 2 * packed.shape[1]))
    stored = NVFP4QTensor(shape, torch.float32, packed)
    of_modelopt: Tensor = stored.dequantize(
        torch.float32,
        scale=tensors["weight_scale"],
        double_scale=tensors["weight_scale_2"],
        block_sizes={-1: 16},
        fast=False,
    )
    return of_modelopt


def decompress(folder: Path, target: Path) -> None:
    """Write the checkpoint that its writer's own package makes of a quantized one."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    config = json.loads((folder / "config.json").read_text())
    quantization = config.pop("quantization_config")
    if quantization["quant_method"] == "modelopt":
        quantization |= {"quant_method": "compressed-tensors", "format": "dense"}
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
            is_nvfp4 = {"weight_global_scale", "weight_scale_2"} & tensors.keys()
            weight = (
                nvfp4_meant(tensors, scheme)
                if is_nvfp4
                else reader.decompress(tensors, scheme)["weight"]
            )
            tensors = {"weight": weight, **bias}
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
        if name.startswith(MODELOPT):
            write_by_modelopt(str(base), str(quantized), SCHEMES[name])
        else:
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
        for name in args.schemes or SCHEMES:
            for gptq in (False, True) if name == "W4A16" else (False,):
                figures = compare(key, name, prompts, gptq=gptq)
                writer = "GPTQModifier" if gptq else "QuantizationModifier"
                rows.append(
                    {"family": key[0], "scheme": name, "writer": writer, **figures}
                )
                show(rows[-1])
    packages = ("llmcompressor", "compressed-tensors", "nvidia-modelopt")
    return {"writers": {package: version(package) for package in packages}, "cases": rows}


if __name__ == "__main__":
    options = {"--prompts": 8, "--seed": 0}
    some = {"--schemes": {"nargs": "*", "default": [], "choices": [*SCHEMES]}}
    run("formats_by_others", measure, options | some)

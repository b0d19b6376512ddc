"""GGUF files that llama.cpp quantizes, beside the `gguf` package's dequantization.

Runs in an environment of its own, which has `llama-cpp-python` beside minfer. A tiny
random model is written by the `gguf` package and quantized by llama.cpp to each of its
types that needs no calibration. Compares each of minfer's matrices with what the package
makes of the file, and greedy tokens with those of transformers' model on these numbers.
"""

import argparse
import random
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import gguf
import pytest
import torch

from bench.results import run, show
from minfer.effects.models.architecture import layers
from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.checkpoint.checkpoint import load_weights, read_config
from minfer.effects.models.checkpoint.stored_matrices import as_stored
from minfer.kernels.leaves import Linear
from minfer.kernels.quantized import dequantize
from tests.effects.families import SMALL
from tests.effects.models.formats.test_formats import leaves
from tests.effects.models.gguf.written import tensors, write
from tests.effects.parity import serve_twice, their_tokens
from tests.effects.tiny_families import VARIANTS, save

# Rows of all matrices are multiples of the largest block.
SIZES: Final = {
    "hidden_size": 256,
    "head_dim": 64,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
}
FAMILIES: Final = (("Llama", "plain"), ("Qwen3", "plain"))
# llama.cpp's mixtures, by the names of `llama_ftype`
MIXTURES: Final = (
    "F16",
    "BF16",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q2_K",
    "Q3_K_S",
    "Q3_K_M",
    "Q4_K_M",
    "Q5_K_M",
    "Q6_K",
    "IQ3_S",
    "IQ4_NL",
    "IQ4_XS",
    "TQ1_0",
    "TQ2_0",
)
TOKENS: Final = 30  # of a continuation


def quantize(source: Path, target: Path, mixture: str) -> None:
    """Have llama.cpp quantize a file."""
    # mypy: installed where this runs alone.
    import llama_cpp  # type: ignore[import-not-found]

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{mixture}")
    params.nthread = 1
    failed = llama_cpp.llama_model_quantize(
        str(source).encode(), str(target).encode(), params
    )
    if failed:
        raise RuntimeError(f"llama.cpp did not write {mixture}")


def fill(family: str, model: Any, path: Path) -> Counter[str]:
    """Put what a file's numbers mean into the model; returns its tensors by type."""
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    kinds: Counter[str] = Counter()
    for named in tensors(family, model):
        tensor = stored[named.name]
        kinds[tensor.tensor_type.name] += 1
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        meant = torch.from_numpy(numbers.copy()).reshape(named.tensor.shape)
        if named.heads:  # Llama's order of a head's dimensions
            shape = (named.heads, -1, 2, *meant.shape[1:])
            meant = meant.reshape(shape).swapaxes(1, 2).reshape(named.tensor.shape)
        with torch.no_grad():
            named.tensor.copy_(meant)
    return kinds


def matrices(checkpoint: Path) -> list[Linear]:
    """All leaves that minfer reads."""
    described = str(checkpoint)
    spec = as_stored(
        parse_spec(read_config(checkpoint), described, "float32"), checkpoint
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "in_kernel_layout", lambda leaf: leaf)
        return leaves(load_weights(checkpoint, spec, "float32"))


def compare(key: tuple[str, str], mixture: str, prompts: list[list[int]]) -> Any:
    """What differs, of a family and a mixture of types."""
    with TemporaryDirectory() as place:
        folder = Path(place)
        model = save(place, key[0], VARIANTS[key] | SIZES)
        whole = write(folder / "whole.gguf", key[0], model, {})
        path = folder / "quantized.gguf"
        quantize(whole, path, mixture)
        kinds = fill(key[0], model, path)
        model.save_pretrained(folder / "meant")
        pairs = zip(matrices(path), matrices(folder / "meant"), strict=True)
        largest = max(
            float((dequantize(leaf) - meant.weight).abs().max()) for leaf, meant in pairs
        )
        passes, _ = serve_twice(str(path), prompts, TOKENS, **SMALL)
        expected = [their_tokens(model, [prompt], TOKENS)[0] for prompt in prompts]
        different = sum(
            tokens != wanted
            for outputs in passes
            for tokens, wanted in zip(outputs, expected, strict=True)
        )
    return {
        "tensors": dict(kinds),
        "largest_difference": largest,
        "sequences": 2 * len(prompts),
        "different": different,
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    draw, rows = random.Random(args.seed), list[dict[str, Any]]()
    lengths = draw.choices(range(1, 61), k=args.prompts)
    prompts = [draw.choices(range(160), k=length) for length in lengths]
    for key in FAMILIES:
        for mixture in MIXTURES:
            rows.append({"family": key[0], "mixture": mixture})
            rows[-1] |= compare(key, mixture, prompts)
            show(rows[-1])
    packages = ("llama-cpp-python", "gguf")
    return {"writers": {package: version(package) for package in packages}, "cases": rows}


if __name__ == "__main__":
    run("gguf_by_llama_cpp", measure, {"--prompts": 4, "--seed": 0})

"""Every scheme of quantized matrices in every family, against transformers' model with
the same arithmetic in float32: greedy tokens.

The reference is transformers' model on dequantized matrices. Where a scheme rounds
activations, those of the matrices that it quantizes are rounded before each product, by
this file's own few lines. minfer quantizes the unquantized checkpoint as it loads it,
serves the prompts in small blocks and chunks, and again from its prefix cache. Counts
tokens that differ, and by how much the two best logits differ where the first one does.
"""

import argparse
import random
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.results import run, show
from minfer.effects.models.architecture.quantization import LEVELS
from minfer.kernels.leaves import Linear, Scheme
from minfer.kernels.quantized import dequantize, quantize
from tests.effects.families import SMALL
from tests.effects.parity import serve_twice, their_tokens
from tests.effects.tiny_families import VARIANTS, WINDOW, save

MATRIX: Final = re.compile(
    r".*layers\.\d+\..*(?<!kv_b)(?<!\.b)(?<!mamba\.x)(?<!mamba\.dt)_(proj|mqa)(\.weight)?"
    r"|.*layers\.\d+\.per_layer_(input_gate|projection)\.weight"  # Gemma 3n and 4
    r"|.*\.h\.\d+\..*(dense|query_key_value|4h|_h)\.weight"  # Falcon
)
# One config of each family, and sizes that groups of 32 divide.
CASES: Final = {
    ("Qwen2", "plain"): {},
    ("Qwen3", "attention_bias"): {},
    ("Llama", "biases, tied"): {},
    ("Mistral", "window"): {},
    ("Mixtral", "experts"): {},
    ("Qwen2Moe", "experts"): {
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    },
    ("Qwen3Moe", "experts"): {"moe_intermediate_size": 32},
    ("Glm4Moe", "groups"): {"moe_intermediate_size": 32},
    ("DeepseekV2", "groups"): {
        "moe_intermediate_size": 32,
        "v_head_dim": 16,
        "q_lora_rank": 32,
    },
    ("DeepseekV3", "groups"): {"moe_intermediate_size": 32, "v_head_dim": 16},
    ("Laguna", "windows, heads by layer"): {
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    },
    ("MiniMaxM2", "half turn"): {},
    ("Dots1", "groups, windows"): {"moe_intermediate_size": 32},
    ("SolarOpen", "groups, biases"): {"moe_intermediate_size": 32},
    ("HunYuanDenseV1", "alpha"): {},
    ("HunYuanMoEV1", "biases, alpha"): {},
    ("Ernie4_5", "biases"): {},
    ("Ernie4_5_Moe", "experts"): {"moe_intermediate_size": 32},
    ("GptOss", "alternate"): {},
    ("Gemma2", "caps"): {},
    ("Gemma3", "pattern"): {},
    ("Granite", "multipliers"): {},
    ("Olmo2", "norms behind"): {},
    ("Olmoe", "biases, normalised"): {"intermediate_size": 32},
    ("Phi3", "partial"): {},
    ("Cohere", "norms of heads"): {},
    ("StableLm", "all"): {},
    ("Falcon", "two norms"): {},
    ("KimiLinear", "plain"): {
        "moe_intermediate_size": 32,
        "linear_head_dim": 32,
        "kv_lora_rank": 64,
        "v_head_dim": 16,
    },
    ("Jamba", "plain"): {},
    ("Gemma3n", "all"): {"hidden_size_per_layer_input": 32},
    ("Gemma4", "shared keys"): {"hidden_size_per_layer_input": 32},
    ("Gemma4", "all"): {
        "hidden_size_per_layer_input": 32,
        "moe_intermediate_size": 32,
    },
}
# Groups of 128 are wider than these models.
SCHEMES: Final = ("fp8", "fp8_per_block", "int8", "int4-g32", "mxfp4", "nvfp4")


def through(matrix: Tensor, scheme: Scheme) -> Tensor:
    """A matrix, or several, rounded to a scheme's numbers."""
    stored = quantize(matrix, scheme, torch.float32)
    parts = (matrix.shape[-2],)
    return dequantize(Linear(**stored._asdict(), scheme=scheme, parts=parts))


def dequantized(name: str, matrix: Tensor, scheme: Scheme, *, turned: bool) -> Tensor:
    """A parameter of transformers' model, of which each matrix is rounded."""
    matrix_rows = matrix.mT if turned else matrix
    if matrix.dim() == 2 and name.endswith(("qkv_proj.weight", "gate_up_proj.weight")):
        # There are half as many key heads as query heads.
        half = len(matrix) // 2
        parts = [half, half // 2, half // 2] if "qkv" in name else [half, half]
        pieces = matrix.split_with_sizes(parts)
        return torch.cat([through(piece, scheme) for piece in pieces])
    if name.endswith("gate_up_proj"):
        halves = (
            [matrix_rows[:, ::2], matrix_rows[:, 1::2]]
            if turned
            else [*matrix_rows.chunk(2, 1)]
        )
        gate, up = (through(half, scheme) for half in halves)
        matrix_rows = (
            torch.stack((gate, up), 2).flatten(1, 2)
            if turned
            else torch.cat((gate, up), 1)
        )
    else:
        matrix_rows = through(matrix_rows, scheme)
    return matrix_rows.mT if turned else matrix_rows


def rounded(x: Tensor, scheme: Scheme) -> Tensor:
    """Activations as a scheme rounds them."""
    if scheme.activations == "as they are":
        return x
    size = scheme.group if scheme.activations == "groups" else x.shape[-1]
    pieces = []
    for piece in torch.split(x.float(), size, -1):
        largest = piece.abs().amax(-1, keepdim=True)
        max_number = 127 if scheme.name == "int8" else 448
        scale = torch.where(largest > 0, largest / max_number, 1)
        if scheme.name == "int8":
            pieces.append((piece / scale).round() * scale)
        else:
            pieces.append((piece / scale).to(torch.float8_e4m3fn).float() * scale)
    return torch.cat(pieces, -1)


@contextmanager
def arithmetic(model: Any, scheme: Scheme, *, turned: bool) -> Iterator[None]:
    """transformers' model computes as the scheme says."""
    quantized: set[int] = set()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if MATRIX.fullmatch(name) is None:
                continue
            stacked = parameter.dim() == 3
            rounded_parameter = dequantized(
                name, parameter, scheme, turned=turned and stacked
            )
            parameter.copy_(rounded_parameter)
            tensors = parameter if stacked else [parameter]
            quantized |= {tensor.data_ptr() for tensor in tensors}
    plain, product = F.linear, Tensor.__matmul__

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.data_ptr() in quantized:
            x = rounded(x, scheme)
        return plain(x, weight, bias)

    def multiply(x: Tensor, weight: Tensor) -> Tensor:
        if weight.data_ptr() in quantized:
            x = rounded(x, scheme)
        return product(x, weight)

    patched: Any = Tensor
    functions: Any = F
    functions.linear, patched.__matmul__ = linear, multiply
    try:
        yield
    finally:
        functions.linear, patched.__matmul__ = plain, product


def compare(
    key: tuple[str, str], level: str, prompts: list[list[int]], tokens: int
) -> dict[str, Any]:
    """Continue the prompts with both; what differs."""
    scheme = LEVELS[level]
    with tempfile.TemporaryDirectory() as folder:
        model = save(folder, key[0], VARIANTS[key] | CASES[key])
        model.set_experts_implementation("eager")
        passes, _ = serve_twice(folder, prompts, tokens, quantization=level, **SMALL)
        with arithmetic(model, scheme, turned=key[0] == "GptOss"):
            expected = [their_tokens(model, [prompt], tokens)[0] for prompt in prompts]
            gaps = [
                _gap(model, prompt, output, expected_output)
                for outputs in passes
                for prompt, output, expected_output in zip(
                    prompts, outputs, expected, strict=True
                )
                if output != expected_output
            ]
    return {
        "sequences": len(passes) * len(prompts),
        "different": len(gaps),
        "largest_gap": max(gaps, default=0.0),
        "different_tokens": len(
            {token for continuation in expected for token in continuation}
        ),
    }


def _gap(model: Any, prompt: list[int], output: list[int], expected: list[int]) -> float:
    """How far apart the reference's logits of the first tokens that differ are."""
    index = next(
        i
        for i, pair in enumerate(zip(output, expected, strict=True))
        if pair[0] != pair[1]
    )
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + expected[:index]])).logits[0, -1]
    return float(logits[expected[index]] - logits[output[index]])


def measure(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    rng, rows = random.Random(args.seed), list[dict[str, Any]]()
    for key in CASES:
        lengths = rng.choices(range(1, 3 * WINDOW + 1), k=args.prompts)
        prompts = [rng.choices(range(160), k=length) for length in lengths]
        for level in SCHEMES:
            figures = compare(key, level, prompts, args.tokens)
            rows.append({"family": key[0], "scheme": level, **figures})
            show(rows[-1])
    return {"prompts": args.prompts, "tokens": args.tokens, "cases": rows}


if __name__ == "__main__":
    run("schemes", measure, {"--prompts": 8, "--tokens": 50, "--seed": 0})

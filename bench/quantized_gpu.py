"""Quantized matrices of a dense model on a GPU: speed and memory by level.

    python -m bench.quantized_gpu --shape 7B

Output tokens a second of 512 tokens in and 128 out, greedy, without prefix cache, prefill
included, and the bytes that weights hold, as PyTorch's allocator counts them. Weights are
random.
"""

import argparse
import gc
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import torch

from bench.results import run, spread
from bench.shapes import SHAPES, TINY, qwen
from minfer import LLM, SamplingParams

INPUTS, OUTPUTS = 512, 128
LEVELS: Final = ["none", "fp8", "int4", "int4-g32"]
TOO_WIDE: Final = "int4"  # its groups are longer than the tiny shapes' rows


def ask(llm: LLM, rows: int, inputs: int, outputs: int, rng: random.Random) -> float:
    """Output tokens a second."""
    prompts = [rng.choices(range(100, 2000), k=inputs) for _ in range(rows)]
    params = SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True)
    began = time.perf_counter()
    generated = llm.generate(prompts, params, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in generated) / (
        time.perf_counter() - began
    )


def level(name: str, folder: str, args: argparse.Namespace) -> dict[str, Any]:
    """What one level does."""
    began = time.perf_counter()
    small = args.shape in TINY
    llm = LLM(
        folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=256 if small else 2048,
        max_num_seqs=256,
        quantization=None if name == "none" else name,
    )
    result: dict[str, Any] = {
        "start_s": time.perf_counter() - began,
        "weights": llm.setup.memory.weights,
        "tok_s": {},
    }
    rng, inputs = random.Random(0), 64 if small else INPUTS
    for rows in args.rows:
        ask(llm, min(rows, 8), inputs, 2, rng)
        times = [ask(llm, rows, inputs, OUTPUTS, rng) for _ in range(args.repeats)]
        result["tok_s"][rows] = spread(times)
        print(name, rows, result["tok_s"][rows], flush=True)
    llm.close()
    del llm
    gc.collect()
    torch.cuda.empty_cache()
    return result


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All levels."""
    with tempfile.TemporaryDirectory() as folder:
        config = qwen(args.shape)
        (Path(folder) / "config.json").write_text(json.dumps(config))
        small = args.shape in TINY
        levels = [name for name in args.levels if not (small and name == TOO_WIDE)]
        return {name: level(name, folder, args) for name in levels}


if __name__ == "__main__":
    run(
        "quantized_gpu",
        measure,
        {
            "--shape": {"choices": [*SHAPES, *TINY], "default": "7B"},
            "--levels": {"nargs": "+", "default": LEVELS},
            "--rows": {"nargs": "+", "type": int, "default": [1, 8, 64, 256]},
            "--repeats": 2,
        },
    )

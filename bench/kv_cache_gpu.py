"""KV caches in 8 bits on a GPU: first token, decode step and sequences at once by type.

    python -m bench.kv_cache_gpu --shape 7B

Random weights, no prefix cache. The step is the mean over 64 steps in which 8 rows with
32,000 tokens each decode and nothing is prefilled, by events on the GPU's timeline; the
first token is that of one prompt in an idle engine. Each figure is the median of
repeated runs, after one that does not count.
"""

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any, Final

import torch

from bench.gpu_workloads import Lab, figure, greedy, rate, steady
from bench.results import run, show
from bench.shapes import SHAPES
from minfer.effects.models.architecture.kv_format import AUTO

TYPES: Final = (AUTO, "fp8", "int8_per_token_head")
ROWS, CONTEXT, PROMPTS = 8, 32_000, (8192, 32_000)


def measure_type(lab: Lab, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """What an engine with a cache of this type does."""
    llm = lab.engine(args.shape, kv_cache_dtype=name, gpu_memory_utilization=0.9)
    plan = llm.setup.memory
    result: dict[str, Any] = {
        "kv_bytes_of_a_token": plan.block_bytes / plan.sizes.block_size,
        "sequences": plan.num_blocks * plan.sizes.block_size // CONTEXT,
    }
    for length in PROMPTS:
        runs = [
            1e3 / rate(llm, lab.prompts(1, length), [greedy(1)])
            for _ in range(args.repeats + 1)
        ]
        result[f"ttft_{length}"] = figure(runs[1:], "ms")
    steps = [steady(lab, llm, ROWS, CONTEXT)[0] for _ in range(args.repeats)]
    result["step"] = figure(steps, "ms")
    return result


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All types."""
    with tempfile.TemporaryDirectory() as folder:
        lab, results = Lab(Path(folder), random.Random(0)), {}
        for name in args.types:
            results[name] = measure_type(lab, name, args)
            show({name: results[name]})
        lab.close()
    return {"card": torch.cuda.get_device_name(), "types": results}


if __name__ == "__main__":
    run(
        "kv_cache_gpu",
        measure,
        {
            "--shape": {"choices": [*SHAPES], "default": "7B"},
            "--types": {"nargs": "+", "choices": TYPES, "default": [*TYPES]},
            "--repeats": 3,
        },
    )

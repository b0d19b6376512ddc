"""vLLM at the shapes of `layers_gpu`: output tokens a second, as that measures minfer.

    python -m bench.layers_vllm --model phi4

For an environment with vLLM beside minfer. Random weights, and vLLM's defaults but for
the prefix cache, which is off.
"""

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from bench.layers_gpu import COMMON, INPUTS, OUTPUTS, SHAPES
from bench.results import run, spread

SETTINGS: Final = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1"}
MAX_LENGTH: Final = 8192  # tokens of a request
REPEATS: Final = 3


def ask(llm: Any, rng: random.Random, rows: int, inputs: int, outputs: int) -> float:
    """Returns output tokens a second of `rows` requests at once."""
    from vllm import SamplingParams

    prompts = [
        {"prompt_token_ids": rng.choices(range(100, 100_000), k=inputs)}
        for _ in range(rows)
    ]
    params = SamplingParams(
        temperature=0, max_tokens=outputs, ignore_eos=True, detokenize=False
    )
    began = time.perf_counter()
    generated = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    return sum(len(output.outputs[0].token_ids) for output in generated) / seconds


def measured(name: str, numbers_of_rows: list[int]) -> dict[str, Any]:
    """Measure one model."""
    from vllm import LLM

    with tempfile.TemporaryDirectory() as folder:
        config = json.dumps({**SHAPES[name], **COMMON})
        (Path(folder) / "config.json").write_text(config)
        began = time.perf_counter()
        llm = LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=MAX_LENGTH,
            max_num_seqs=256,
            enable_prefix_caching=False,
            gpu_memory_utilization=0.88,
        )
        start, rng, throughput = time.perf_counter() - began, random.Random(0), []
        for rows in numbers_of_rows:
            ask(llm, rng, min(rows, 8), INPUTS, 2)
            speeds = [ask(llm, rng, rows, INPUTS, OUTPUTS) for _ in range(REPEATS)]
            throughput.append({"rows": rows, "tok_s": spread(speeds)})
            print(name, throughput[-1], flush=True)
    return {"start_s": start, "throughput": throughput}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the model."""
    for name, value in SETTINGS.items():  # read when vllm is imported
        os.environ.setdefault(name, value)
    import torch
    import vllm

    figures = measured(args.model, args.rows)
    card = torch.cuda.get_device_name()
    return {"card": card, "vllm": vllm.__version__, args.model: figures}


if __name__ == "__main__":
    run(
        "layers_vllm",
        measure,
        {
            "--model": {"choices": [*SHAPES], "required": True},
            "--rows": {"nargs": "*", "type": int, "default": [1, 8, 64, 256]},
        },
    )

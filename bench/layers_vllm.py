"""vLLM at the shapes of `layers_gpu`: what that measures of minfer.

    python -m bench.layers_vllm --model phi4

For an environment with vLLM beside minfer. Random weights, embeddings and routers drawn
as there, and vLLM's defaults but for the prefix cache, which is off. With `--start FILE`
it measures when that file is there, and with `--cache` it takes no more memory than that:
vLLM may start beside other work.
"""

import argparse
import json
import os
import random
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from bench.layer_loads import LONG, STEPS, Figures, Loads, measured, step_figures
from bench.layers_gpu import COMMON, SHAPES
from bench.results import run

SETTINGS: Final = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # of `spread_routing`
    # Else 1,949 kernels are compiled at the start with FP8 in blocks, for 15 minutes and
    # more. Those that are used are compiled by the first requests.
    "VLLM_DEEP_GEMM_WARMUP": "skip",
}
DRAWN: Final = ("embed_tokens.weight", "mlp.gate.weight", "router.layer.weight")


def set_environment() -> None:
    """Set what vLLM reads when it is imported, as far as it is not set."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


def spread_routing(model: Any) -> int:
    """Draw embeddings and routers of vLLM's model from N(0, 1)."""
    parameters = [p for name, p in model.named_parameters() if name.endswith(DRAWN)]
    for parameter in parameters:
        parameter.data.normal_()
    return len(parameters)


class Model:
    """vLLM with one model."""

    def __init__(self, llm: Any, words: range = range(100, 100_000)) -> None:
        self.llm, self.words = llm, words
        self.rng = random.Random(0)

    def prompts(self, rows: int, inputs: int) -> list[dict[str, list[int]]]:
        """Returns random prompts."""
        draws = [self.rng.choices(self.words, k=inputs) for _ in range(rows)]
        return [{"prompt_token_ids": ids} for ids in draws]

    def ask(self, rows: int, inputs: int, outputs: int) -> float:
        """Returns output tokens a second of `rows` requests at once."""
        prompts = self.prompts(rows, inputs)
        params = greedy(outputs)
        began = time.perf_counter()
        generated = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        return sum(len(output.outputs[0].token_ids) for output in generated) / seconds

    def steps(self, rows: int, context: int) -> Figures:
        """Returns the median time of a step in which `rows` decode, in milliseconds:
        between outputs of steps that gave each row a token, one after another.
        """
        engine, ends = self.llm.llm_engine, list[float | None]()
        for place, prompt in enumerate(self.prompts(rows, context)):
            engine.add_request(f"step-{place}", prompt, greedy(STEPS))
        while engine.has_unfinished_requests():
            outputs = engine.step()
            if outputs:
                full = len(outputs) == rows
                ends.append(time.perf_counter() if full else None)
        gaps = [end - before for before, end in pairwise(ends) if before and end]
        return step_figures(rows, context, gaps)


def memory_settings(cache: float) -> dict[str, Any]:
    """Returns vLLM's settings for a `cache` in GB; 0: of what is free."""
    if not cache:
        return {"gpu_memory_utilization": 0.88}
    return {"kv_cache_memory_bytes": int(cache * 1e9), "gpu_memory_utilization": 0.05}


def greedy(outputs: int) -> Any:
    """Returns vLLM's parameters of greedy sampling, without text."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0, max_tokens=outputs, ignore_eos=True, detokenize=False
    )


def measured_model(args: argparse.Namespace) -> dict[str, Any]:
    """Measure one model."""
    from vllm import LLM

    with tempfile.TemporaryDirectory() as folder:
        config = json.dumps({**SHAPES[args.model], **COMMON})
        (Path(folder) / "config.json").write_text(config)
        began = time.perf_counter()
        llm = LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=LONG + 2000,
            max_num_seqs=256,
            enable_prefix_caching=False,
            mamba_ssm_cache_dtype=args.state_dtype,
            **memory_settings(args.cache),
        )
    row: dict[str, Any] = {"start_s": time.perf_counter() - began}
    row["spread"] = llm.apply_model(spread_routing)
    print(args.model, row, flush=True)
    while args.start is not None and not args.start.exists():
        time.sleep(0.1)
    loads = Loads(args.rows, args.long, args.prefill)
    return {**row, **measured(args.model, Model(llm), loads)}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the model."""
    set_environment()
    import torch
    import vllm

    figures = measured_model(args)
    card = torch.cuda.get_device_name()
    return {"card": card, "vllm": vllm.__version__, args.model: figures}


if __name__ == "__main__":
    integers = {"nargs": "*", "type": int}
    options = {
        "--model": {"choices": list(SHAPES), "default": "phi4"},
        "--rows": {**integers, "default": [1, 8, 64, 256]},
        "--long": {**integers, "default": [1]},
        "--prefill": {**integers, "default": [8192, LONG]},
        "--cache": 0.0,  # GB
        "--state-dtype": "auto",  # the config's mamba_ssm_dtype, or the activations'
        "--start": {"type": Path, "help": "wait for this file before measuring"},
    }
    run("layers_vllm", measure, options)

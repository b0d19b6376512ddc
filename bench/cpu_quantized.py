"""Quantized matrices on the CPU beside transformers: one shape, one run.

    python -m bench.cpu_quantized

Output tokens a second at batch 1 and 8, prompts of 32 tokens included, and prompt tokens
a second of a prompt of 512. Weights are random, and loaded in bfloat16; minfer rounds
them as it loads them. transformers runs in bfloat16 and in float32: a ratio is against
the faster of the two by the medians, within a repetition, in which all sides take turns.
Both engines use as many threads: with one, tokens a second of the processor do not count
the time in which others had it. The processor's instructions decide much: they stand
beside the figures.
"""

import argparse
import gc
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final

import torch
import transformers

from bench.results import run, show, spread
from bench.shapes import SHAPES, TINY, qwen
from minfer import LLM, SamplingParams
from minfer.effects.live.engine.interpreter import paused_collector
from minfer.kernels import cpu_int8
from tests.effects.parity import their_tokens

PROMPT: Final = 32
PREFILL: Final = 512
IDS: Final = range(10, 1900)
FLAGS: Final = ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_int8")

Prompts = list[list[int]]
Serve = Callable[
    [Prompts, int], Prompts
]  # greedy tokens, and their number for each prompt


def engine(folder: Path, level: str) -> LLM:
    return LLM(
        str(folder),
        dtype="bfloat16",
        quantization=None if level == "bfloat16" else level,
        load_format="dummy",
        skip_tokenizer_init=True,
        num_gpu_blocks_override=128,
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=1024,
    )


def ours(llm: LLM) -> Serve:
    def serve(prompts: Prompts, tokens: int) -> Prompts:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return serve


def theirs(folder: Path, dtype: str) -> Serve:
    config = transformers.AutoConfig.from_pretrained(folder)
    make: Any = transformers.AutoModelForCausalLM.from_config
    model: Any = make(
        config, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    ).eval()

    def serve(prompts: Prompts, tokens: int) -> Prompts:
        return their_tokens(model, prompts, tokens)

    return serve


def rates(
    sides: dict[str, Serve],
    batch: int,
    size: int,
    tokens: int,
    counted: int,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Tokens a second of each side, `counted` being one request's, and the ratios to the
    faster of transformers' sides.
    """
    rng = random.Random(args.seed)
    speeds: dict[str, dict[str, list[float]]] = {
        by: {side: [] for side in sides} for by in ("clock", "processor")
    }
    for number in range(args.repetitions + 1):
        prompts = [rng.choices(IDS, k=size) for _ in range(batch)]  # none is cached
        for side in sorted(sides, reverse=number % 2 == 1):
            clock, processor = time.perf_counter(), time.process_time()
            outputs = sides[side](prompts, tokens)
            spent = {
                "clock": time.perf_counter() - clock,
                "processor": time.process_time() - processor,
            }
            assert [*map(len, outputs)] == [tokens] * batch, "requests have failed"
            if number:  # the first warms up
                for by, seconds in spent.items():
                    speeds[by][side].append(batch * counted / seconds)
    return {by: _beside(side_speeds) for by, side_speeds in speeds.items()}


def _beside(speeds: dict[str, list[float]]) -> dict[str, Any]:
    medians = {side: statistics.median(values) for side, values in speeds.items()}
    best = max(
        (s for s in speeds if s.startswith("transformers")), key=medians.__getitem__
    )
    ratios = {
        side: spread([a / b for a, b in zip(values, speeds[best], strict=True)])
        for side, values in speeds.items()
        if side.startswith("minfer")
    }
    return {
        "tokens_per_second": {side: spread(values) for side, values in speeds.items()},
        "against": best,
        "ratios": ratios,
    }


def instructions() -> list[str]:
    """The processor's, of those that matter here."""
    text = Path("/proc/cpuinfo").read_text("utf-8").split()
    return [flag for flag in FLAGS if flag in text]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(args.threads)
    results: dict[str, Any] = {
        "instructions": instructions(),
        "int8": cpu_int8.description(),
        "shape": args.shape,
    }
    show(results)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(paused_collector())  # for both
        (folder / "config.json").write_text(json.dumps(qwen(args.shape)))
        sides = {f"transformers {t}": theirs(folder, t) for t in ("bfloat16", "float32")}
        for level in args.levels:
            llm = stack.enter_context(closing(engine(folder, level)))
            sides[f"minfer {level}"] = ours(llm)
        gc.collect()
        for name, batch, size, tokens in (
            ("batch 1", 1, PROMPT, args.tokens),
            ("batch 8", 8, PROMPT, args.tokens),
            ("prefill", 1, PREFILL, 1),
        ):
            counted = size if tokens == 1 else tokens
            results[name] = rates(sides, batch, size, tokens, counted, args)
            show(
                {
                    name: results[name]["clock"],
                    "of the processor": results[name]["processor"],
                }
            )
    return results


if __name__ == "__main__":
    run(
        "cpu_quantized",
        measure,
        {
            "--shape": {"choices": [*SHAPES, *TINY], "default": "0.5B"},
            "--levels": {"nargs": "+", "default": ["bfloat16", "int8", "int4-g32"]},
            "--tokens": 32,
            "--repetitions": 3,
            "--threads": torch.get_num_threads(),
            "--seed": 0,
        },
    )

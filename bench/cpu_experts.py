"""Mixtures of experts on the CPU beside transformers: same weights and prompts, one run.

    python -m bench.cpu_experts

Output tokens a second of batches of 64 tokens in and 64 out, greedy, prompts included.
The shapes are Qwen3-MoE's, with random weights that transformers' own class has made.
transformers' `generate` is the fastest of its implementations of experts and its caches,
each tried first at this shape, type and batch. Both engines use as many threads: with
one, tokens a second of the processor do not count the time in which others had it.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final

import torch
import transformers

from bench.results import run, show, spread
from minfer import LLM, SamplingParams
from minfer.effects.live.engine.interpreter import paused_collector
from tests.effects.tiny_families import save

TOKENS: Final = 64  # of each prompt, and of each output
BATCHES: Final = (1, 4)
# hidden size, layers, experts, width of an expert, heads; 4 experts a token
SIZES: Final = {"small": (256, 8, 32, 128, 4), "medium": (512, 8, 32, 256, 8)}
# "batched_mm" copies the matrices, and is several times slower.
EXPERTS: Final = ("eager", "grouped_mm")
CACHES: Final = ("dynamic", "static")

Rates = dict[str, float]  # tokens per second of the clock, and of the processor
Generate = Callable[[list[list[int]]], list[list[int]]]


def config(name: str) -> dict[str, Any]:
    """The config of a shape."""
    hidden, layers, experts, inter, heads = SIZES[name]
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_experts": experts,
        "moe_intermediate_size": inter,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 8000,
        "max_position_embeddings": 4 * TOKENS,
        "initializer_range": 0.1,
        "eos_token_id": None,
    }


def ours(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def theirs(
    model: Any, experts: str, cache: str, prompts: list[list[int]]
) -> list[list[int]]:
    model.set_experts_implementation(experts)
    ids = torch.tensor(prompts)
    tokens: list[list[int]] = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=TOKENS,
        do_sample=False,
        pad_token_id=0,
        cache_implementation=cache,
        disable_compile=True,
    )[:, TOKENS:].tolist()
    return tokens


def rate(generate: Generate, prompts: list[list[int]]) -> tuple[Rates, list[list[int]]]:
    """Tokens per second, and the tokens."""
    clock, processor = time.perf_counter(), time.process_time()
    tokens = generate(prompts)
    seconds = {
        "clock": time.perf_counter() - clock,
        "processor": time.process_time() - processor,
    }
    assert [*map(len, tokens)] == [TOKENS] * len(prompts), "requests have failed"
    return {by: TOKENS * len(prompts) / spent for by, spent in seconds.items()}, tokens


def compare(llm: LLM, model: Any, batch: int, pairs: int, seed: int) -> dict[str, Any]:
    """Tokens per second of both, in turns, and the ratio within pairs."""
    rng = random.Random(seed)

    def prompts() -> list[list[int]]:  # new ones each time, so none is cached
        return [rng.choices(range(8000), k=TOKENS) for _ in range(batch)]

    ways = {
        f"{e}, {c}": partial(theirs, model, e, c) for e, c in product(EXPERTS, CACHES)
    }
    tried = {
        way: rate(generate, prompts())[0]["processor"] for way, generate in ways.items()
    }
    best = max(tried, key=tried.__getitem__)
    sides: dict[str, Generate] = {
        "minfer": partial(ours, llm),
        "transformers": ways[best],
    }
    rate(sides["minfer"], prompts())
    rates: dict[str, list[Rates]] = {side: [] for side in sides}
    equal = 0
    for number in range(pairs):
        work, outputs = prompts(), {}
        for side in sorted(sides, reverse=number % 2 == 1):
            speed, outputs[side] = rate(sides[side], work)
            rates[side].append(speed)
        equal += sum(map(list.__eq__, *outputs.values()))
    return {
        **{by: _beside(rates, by) for by in ("clock", "processor")},
        "equal_outputs": equal,
        "outputs": pairs * batch,
        "transformers_experts_and_cache": best,
        "tried": tried,
    }


def _beside(rates: dict[str, list[Rates]], by: str) -> dict[str, Any]:
    minfer_speeds, transformers_speeds = (
        [speed[by] for speed in rates[side]] for side in ("minfer", "transformers")
    )
    ratios = [a / b for a, b in zip(minfer_speeds, transformers_speeds, strict=True)]
    return {
        "minfer": spread(minfer_speeds),
        "transformers": spread(transformers_speeds),
        "ratio": spread(ratios),
    }


def measure(folder: Path, dtype: str, pairs: int, seed: int) -> dict[str, Any]:
    read = transformers.AutoModelForCausalLM
    model = read.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    llm = LLM(
        str(folder),
        dtype=dtype,
        skip_tokenizer_init=True,
        num_gpu_blocks_override=64,
        max_model_len=4 * TOKENS,
        max_num_seqs=max(BATCHES),
        max_num_batched_tokens=1024,
    )
    with closing(llm):
        return {f"batch_{n}": compare(llm, model, n, pairs, seed) for n in BATCHES}


def every_shape(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(args.threads)
    results: dict[str, Any] = {}
    with paused_collector():  # for both
        for name, dtype in product(args.shapes, args.dtypes):
            with tempfile.TemporaryDirectory() as path:
                save(path, "Qwen3Moe", config(name))
                result = measure(Path(path), dtype, args.pairs, args.seed)
            results[f"{name}, {dtype}"] = result
            show({f"{name}, {dtype}": result})
    return results


if __name__ == "__main__":
    run(
        "cpu_experts",
        every_shape,
        {
            "--shapes": {"nargs": "+", "choices": [*SIZES], "default": [*SIZES]},
            "--dtypes": {"nargs": "+", "default": ["float32", "bfloat16"]},
            "--pairs": 5,
            "--threads": 1,
            "--seed": 0,
        },
    )

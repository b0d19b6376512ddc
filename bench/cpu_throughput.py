"""Tokens per second on the CPU against transformers: same weights, same prompts, one run.

Batch 1: one request at a time, transformers' `generate` (greedy, its dynamic cache, sdpa)
and minfer in turns, so that the machine's noise hits both; prompts are part of both
times.

Arrivals: 16 requests of mixed lengths come at seeded random times, faster than one by one
could be served. transformers serves static batches, as well as they can be: whenever it
is free it takes what has arrived, up to N requests, pads on the left and generates up to
the longest output asked for; or it waits until all have arrived. The fastest such policy
is what minfer is compared with. Throughput counts the tokens asked for, from the first
arrival to the last result.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from attrs import frozen

from bench.results import run, show, spread
from bench.shapes import qwen
from minfer import AsyncLLM, SamplingParams
from minfer.effects.live.engine.interpreter import paused_collector
from minfer.effects.setup.folders import bundled_folder
from tests.effects.parity import their_tokens
from tests.effects.tiny_families import save

REQUESTS = 16
# output tokens alone; of arriving requests: the shortest and longest prompt, and output
SIZES = {
    "bundled": (256, (8, 128), (16, 256)),
    "0.5b": (24, (16, 128), (8, 80)),
}
IDS = range(10, 2048)  # which every model has


@frozen
class Arrival:
    """A request and when it comes."""

    prompt: list[int]
    tokens: int  # of output
    at: float = 0.0  # seconds after the run's start


Serve = Callable[[list[Arrival]], list[list[int]]]  # gives the output tokens of each


async def continuous(llm: AsyncLLM, work: list[Arrival]) -> list[list[int]]:
    """As minfer serves: each request joins when it comes."""

    async def output_tokens(arrival: Arrival) -> list[int]:
        await asyncio.sleep(arrival.at)
        params = SamplingParams(temperature=0, max_tokens=arrival.tokens, ignore_eos=True)
        outputs = [
            o async for o in llm.generate_deltas(arrival.prompt, params, streaming=False)
        ]
        return list(outputs[0].outputs[0].token_ids)

    return await asyncio.gather(*map(output_tokens, work))


def static_batches(
    model: Any, max_batch: int, patient: bool, work: list[Arrival]
) -> list[list[int]]:
    """As transformers serves: up to `max_batch` at once; `patient`: wait until all
    are there.
    """
    left, outputs = work, list[list[int]]()
    begin = time.perf_counter()
    while left:
        awaited = left[-1 if patient else 0].at
        time.sleep(max(0.0, awaited - (time.perf_counter() - begin)))
        num_arrived = sum(arrival.at <= time.perf_counter() - begin for arrival in left)
        batch, left = (
            left[: min(num_arrived, max_batch)],
            left[min(num_arrived, max_batch) :],
        )
        out = their_tokens(model, [a.prompt for a in batch], max(a.tokens for a in batch))
        outputs += [tokens[: a.tokens] for a, tokens in zip(batch, out, strict=True)]
    return outputs


def compare(
    serve_minfer: Serve, serve_transformers: Serve, works: list[list[Arrival]]
) -> dict[str, Any]:
    """Tokens per second of both, in turns, and the ratio within pairs."""
    rates: dict[Serve, list[float]] = {serve_minfer: [], serve_transformers: []}
    same = 0
    for number, work in enumerate(works):
        outputs = {}
        for serve in (
            (serve_minfer, serve_transformers)
            if number % 2
            else (serve_transformers, serve_minfer)
        ):
            begin = time.perf_counter()
            outputs[serve] = serve(work)
            rates[serve].append(
                sum(a.tokens for a in work) / (time.perf_counter() - begin)
            )
            assert [*map(len, outputs[serve])] == [a.tokens for a in work], (
                "requests have failed"
            )
        same += outputs[serve_minfer] == outputs[serve_transformers]
    ratios = [
        minfer_rate / transformers_rate
        for minfer_rate, transformers_rate in zip(*rates.values(), strict=True)
    ]
    figures = {
        "minfer": spread(rates[serve_minfer]),
        "transformers": spread(rates[serve_transformers]),
    }
    return {**figures, "ratio": spread(ratios), "equal_outputs": same}


def arrivals(model: str, pace: float, seed: int, rng: random.Random) -> list[Arrival]:
    """Requests whose lengths are spread evenly over their logarithms; `pace` seconds
    apart.

    `seed` decides lengths and times, `rng` the prompts: new ones each time, so none is
    cached.
    """
    sizes, moment, out = random.Random(seed), 0.0, []
    for _ in range(REQUESTS):
        prompt, tokens = (
            round(a * (b / a) ** sizes.random()) for a, b in SIZES[model][1:]
        )
        out.append(Arrival(rng.choices(IDS, k=prompt), tokens, moment))
        moment += sizes.expovariate(1 / pace)
    return out


def measure(name: str, folder: Path, dtype: str, pairs: int, seed: int) -> dict[str, Any]:
    rng, read = random.Random(seed), transformers.AutoModelForCausalLM
    model: Any = read.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    llm = AsyncLLM(
        str(folder),
        dtype=dtype,
        skip_tokenizer_init=True,
        num_gpu_blocks_override=256,
        max_model_len=1024,
        max_num_seqs=REQUESTS,
        max_num_batched_tokens=1024,
    )

    def ours(work: list[Arrival]) -> list[list[int]]:
        return asyncio.run(continuous(llm, work))

    tokens, _, outputs = SIZES[name]
    one_by_one = partial(static_batches, model, 1, False)
    warm, *single = [[Arrival(rng.choices(IDS, k=32), tokens)] for _ in range(pairs + 1)]
    compare(ours, one_by_one, [warm])
    single_requests = compare(ours, one_by_one, single) | {"output_tokens": tokens}
    # Eight come while one could be served alone.
    pace = statistics.mean(outputs) / single_requests["transformers"]["median"] / 8
    policies = {
        f"up to {n}": partial(static_batches, model, n, False) for n in (4, 8, 16)
    }
    policies["all at once"] = partial(static_batches, model, REQUESTS, True)
    tried = {
        policy: compare(ours, serve, [arrivals(name, pace, seed, rng)])["transformers"][
            "median"
        ]
        for policy, serve in policies.items()
    }
    best = max(tried, key=tried.__getitem__)
    works = [arrivals(name, pace, seed, rng) for _ in range(pairs)]
    arriving = compare(ours, policies[best], works) | {
        "static_batching": best,
        "policies_tried": tried,
        "seconds_between_arrivals": pace,
        "last_arrival": works[0][-1].at,
        "prompt_tokens": [len(a.prompt) for a in works[0]],
        "output_tokens": [a.tokens for a in works[0]],
    }
    llm.close()
    return {"batch_1": single_requests, "arriving": arriving}


def every_model(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(args.threads)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as path, paused_collector():  # for both
        for name in args.models:
            title, folder, dtypes = "bundled", bundled_folder(), ["float32", "bfloat16"]
            pairs = args.pairs
            if name == "0.5b":
                save(path, "Qwen2", qwen("0.5B"))
                title, folder, dtypes = "Qwen2.5 0.5B", Path(path), ["bfloat16"]
                pairs = max(3, pairs // 2)
            for dtype in dtypes:
                result = results[f"{title}, {dtype}"] = measure(
                    name, folder, dtype, pairs, args.seed
                )
                show({f"{title}, {dtype}": result})
    return results


if __name__ == "__main__":
    run(
        "cpu_throughput",
        every_model,
        {
            "--models": {"nargs": "+", "choices": [*SIZES], "default": [*SIZES]},
            "--pairs": {
                "type": int,
                "default": 5,
                "help": "of the bundled model; others fewer",
            },
            "--threads": torch.get_num_threads(),
            "--seed": 0,
        },
    )

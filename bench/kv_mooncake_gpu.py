"""Conversations of the Mooncake trace, with loads of KV blocks from host memory, and
without.

    python -m bench.kv_mooncake_gpu --trace mooncake_conversation.jsonl

Random weights; one engine, which never loads at first (`kv_host_choice`), and then by
cost, with other content. Lengths are divided by `--scale`: at 8, a block of the trace is
one of the engine. Requests arrive so fast that their prompts are `--load` of the tokens
that the engine takes in a second if all requests come at once. Reported: the share of
hits, time to the first token, tokens a second.
"""

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import torch
from attrs import evolve, frozen

from bench.gpu_workloads import BLOCK, Lab, greedy
from bench.kv_host_gpu import SETTLE_SECONDS
from bench.results import percentiles, run, show
from bench.shapes import SHAPES, TINY
from minfer import AsyncLLM
from minfer.effects.runs.trace_files import read_trace
from minfer.records.tiers import BY_COST, RECOMPUTE

HOST: Final = 40 << 30  # bytes
AT_ONCE: Final = 200  # requests of which the capacity is measured


@frozen
class Asked:
    """A request."""

    at: float  # seconds from the first
    tokens: list[int]
    output: int  # tokens


def conversations(args: argparse.Namespace, words: int, salt: int = 0) -> list[Asked]:
    """The trace's first requests; other content with another salt."""
    requests = list[Asked]()
    for row in read_trace(str(args.trace), args.requests, args.scale).rows:
        tokens = list[int]()
        for name in row.ids:
            dice = random.Random((salt << 32) + name)
            tokens += dice.choices(range(1, words), k=row.span)
        requests.append(Asked(row.time, tokens[: row.prompt], row.output))
    return requests


async def replayed(llm: AsyncLLM, work: list[Asked], speed: float) -> list[float]:
    """ms to the first token of each request, which arrive `speed` times as fast."""
    began = time.perf_counter()

    async def first_token_ms(asked: Asked) -> float:
        await asyncio.sleep(max(0.0, asked.at / speed - (time.perf_counter() - began)))
        begin, first_token = time.perf_counter(), 0.0
        prompt = {"prompt_token_ids": asked.tokens}
        async for _ in llm.generate_deltas(prompt, greedy(asked.output)):
            first_token = first_token or time.perf_counter()
        return 1e3 * (first_token - begin)

    return [*await asyncio.gather(*map(first_token_ms, work))]


async def served(llm: AsyncLLM, work: list[Asked], speed: float) -> dict[str, Any]:
    """Serve all requests."""
    before = dict(llm.client.snapshot().totals.counts)
    began = time.perf_counter()
    ms = await replayed(llm, work, speed)
    took = time.perf_counter() - began
    after = llm.client.snapshot().totals.counts
    counts = {name: value - before.get(name, 0) for name, value in after.items()}
    return {
        "first token, ms": percentiles(ms),
        "output tokens/s": sum(request.output for request in work) / took,
        "prompt tokens/s": sum(len(request.tokens) for request in work) / took,
        "seconds": took,
        "hit share": counts["prefix_cache_hits"] / counts["prompt_tokens"],
        "counts": {k: v for k, v in counts.items() if v and k.startswith("kv_")},
    }


async def compared(lab: Lab, args: argparse.Namespace) -> dict[str, Any]:
    """Both ways, at a speed that suits the engine."""
    llm = AsyncLLM(
        lab.model(args.shape),
        load_format="dummy",
        device="cuda" if args.gpu else "cpu",
        num_gpu_blocks_override=args.pool,
        max_model_len=min(32_768, args.pool * BLOCK),
        max_num_seqs=256,
        kv_host_memory=args.host,
        kv_host_choice=RECOMPUTE,
    )
    await asyncio.sleep(args.settles if args.gpu else 0)
    warm_up = [
        evolve(request, at=0.0) for request in conversations(args, lab.words, salt=2)
    ]
    warm_up = warm_up[:AT_ONCE]
    await replayed(llm, warm_up[: AT_ONCE // 4], 1.0)  # compiles kernels
    began, timed = time.perf_counter(), warm_up[AT_ONCE // 4 :]
    await replayed(llm, timed, 1.0)
    took = time.perf_counter() - began
    capacity = sum(len(request.tokens) for request in timed) / took
    work = conversations(args, lab.words)
    prompts = sum(len(request.tokens) for request in work)
    speed = args.load * capacity * work[-1].at / prompts
    results: dict[str, Any] = {"capacity, prompt tokens/s": capacity, "speed": speed}
    show(results)
    results["without"] = await served(llm, work, speed)
    show({"without": results["without"]})
    driver = llm.worker.driver
    config = driver.config
    assert config.host is not None
    driver.config = evolve(config, host=evolve(config.host, choice=BY_COST))
    results["with"] = await served(llm, conversations(args, lab.words, 1), speed)
    show({"with": results["with"]})
    llm.close()
    return results


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Both engines."""
    args.gpu = torch.cuda.is_available()
    card = torch.cuda.get_device_name() if args.gpu else "CPU"
    results: dict[str, Any] = {"card": card, "shape": args.shape}
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab.for_shape(folder, args.shape)
        results |= asyncio.run(compared(lab, args))
    return results


if __name__ == "__main__":
    run(
        "kv_mooncake_gpu",
        measure,
        {
            "--shape": {"choices": [*SHAPES, *TINY], "default": "7B"},
            "--trace": {"type": Path, "default": Path("mooncake_conversation.jsonl")},
            "--requests": 900,
            "--scale": 8,
            "--load": 0.9,
            "--pool": 750,  # blocks
            "--host": HOST,
            "--settles": SETTLE_SECONDS,  # seconds
        },
    )

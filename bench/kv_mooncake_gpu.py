"""Conversations of the Mooncake trace with KV blocks in host memory, and without.

    python -m bench.kv_mooncake_gpu --trace mooncake_conversation.jsonl

Random weights. Lengths are divided by `--scale`: at 8, a block of the trace is one of the
engine. Requests arrive so fast that their prompts are `--load` of the tokens that the
engine without the tier takes in a second if as many requests as it holds wait all the
time. Reported: the share of hits, time to the first token, tokens a second.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import torch

from bench.gpu_workloads import BLOCK, Lab, greedy
from bench.kv_host_gpu import SETTLES
from bench.results import ROOT, percentiles, run, show
from bench.shapes import SHAPES, TINY
from minfer import AsyncLLM

BLOCK_OF_TRACE: Final = 512  # tokens of an id
TRACE: Final = ROOT.parent / "shared" / "traces" / "mooncake_conversation.jsonl"
HOST: Final = 40 << 30  # bytes
AT_ONCE: Final = 200  # requests of which the capacity is measured
Work = list[tuple[float, list[int], int]]  # arrival in seconds, tokens, output tokens


def conversations(args: argparse.Namespace, words: int, salt: int = 0) -> Work:
    """The trace's first requests; other content with another salt."""
    found, size = Work(), BLOCK_OF_TRACE // args.scale
    with args.trace.open() as lines:
        for line in lines:
            one = json.loads(line)
            tokens = list[int]()
            for name in one["hash_ids"]:
                dice = random.Random((salt << 32) + name)
                tokens += dice.choices(range(1, words), k=size)
            tokens = tokens[: max(1, one["input_length"] // args.scale)]
            output = max(1, one["output_length"] // args.scale)
            found.append((one["timestamp"] / 1e3, tokens, output))
            if len(found) == args.requests:
                break
    return found


async def replayed(llm: AsyncLLM, work: Work, speed: float) -> list[float]:
    """ms to the first token of each request, which arrive `speed` times as fast."""
    began = time.perf_counter()

    async def one(at: float, tokens: list[int], output: int) -> float:
        await asyncio.sleep(max(0.0, at / speed - (time.perf_counter() - began)))
        asked, got = time.perf_counter(), 0.0
        prompt = {"prompt_token_ids": tokens}
        async for _ in llm.generate(prompt, greedy(output)):
            got = got or time.perf_counter()
        return 1e3 * (got - asked)

    return [*await asyncio.gather(*[one(*each) for each in work])]


async def served(
    lab: Lab, args: argparse.Namespace, speed: float | None, **tier: Any
) -> tuple[float, dict[str, Any]]:
    """Serve all requests in a new engine; at no speed, measure its capacity first.
    Returns the speed, too.
    """
    work = conversations(args, lab.words)
    llm = AsyncLLM(
        lab.model(args.shape),
        load_format="dummy",
        device="cuda" if args.gpu else "cpu",
        num_gpu_blocks_override=args.pool,
        max_model_len=min(32_768, args.pool * BLOCK),
        max_num_seqs=256,
        **tier,
    )
    await asyncio.sleep(SETTLES if args.gpu else 0)
    others = conversations(args, lab.words, salt=1)[:AT_ONCE]
    began = time.perf_counter()  # compiles kernels, too
    await replayed(llm, [(0.0, *one) for _, *one in others[: AT_ONCE // 4]], 1.0)
    prompts = sum(len(tokens) for _, tokens, _ in work)
    if speed is None:
        some = others[AT_ONCE // 4 :]
        began = time.perf_counter()
        await replayed(llm, [(0.0, *one) for _, *one in some], 1.0)
        took = time.perf_counter() - began
        capacity = sum(len(tokens) for _, tokens, _ in some) / took
        speed = args.load * capacity * work[-1][0] / prompts
        show({"capacity, prompt tokens/s": capacity, "speed": speed})
    before = dict(llm.client.snapshot().totals.counts)
    began = time.perf_counter()
    ms = await replayed(llm, work, speed)
    took = time.perf_counter() - began
    after = llm.client.snapshot().totals.counts
    counts = {name: value - before.get(name, 0) for name, value in after.items()}
    llm.close()
    return speed, {
        "first token, ms": percentiles(ms),
        "output tokens/s": sum(output for *_, output in work) / took,
        "prompt tokens/s": prompts / took,
        "seconds": took,
        "hit share": counts["prefix_cache_hits"] / counts["prompt_tokens"],
        "counts": {k: v for k, v in counts.items() if v and k.startswith("kv_")},
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Both engines."""
    args.gpu = torch.cuda.is_available()
    card = torch.cuda.get_device_name() if args.gpu else "CPU"
    found: dict[str, Any] = {"card": card, "shape": args.shape}
    with tempfile.TemporaryDirectory() as folder:
        words = 2000 if args.shape in TINY else 100_000
        lab = Lab(Path(folder), random.Random(0), words=words)
        speed, found["without"] = asyncio.run(served(lab, args, None))
        show({"without": found["without"]})
        tier = {"kv_host_memory": args.host}
        found["speed"], found["with"] = asyncio.run(served(lab, args, speed, **tier))
        show({"with": found["with"]})
    return found


if __name__ == "__main__":
    run(
        "kv_mooncake_gpu",
        measure,
        {
            "--shape": {"choices": [*SHAPES, *TINY], "default": "7B"},
            "--trace": {"type": Path, "default": TRACE},
            "--requests": 900,
            "--scale": 8,
            "--load": 0.9,
            "--pool": 750,  # blocks
            "--host": HOST,
        },
    )

"""What KV blocks in host memory cost and gain while others are served, on a GPU.

    python -m bench.kv_tiers_gpu --parts idle,moving,first,choice,mooncake

Random weights. The parts:

- idle: decode throughput with the tier, against without; nothing is loaded.
- moving: time between tokens of 64 rows while pages cross the bus both ways without a
  pause, against without (but for those that rows fill, which are stored).
- first: the first token of a known prompt of 16k tokens beside 64 rows that decode: from
  host memory, against computed.
- choice: prompts that come again and again, of which the pool holds half: seconds of a
  round if they are always loaded, never, or by cost, for five lengths.
- mooncake: conversations of the Mooncake trace (lengths divided by `--scale`), with the
  tier and without: share of hits, time to the first token, tokens a second.
"""

import argparse
import asyncio
import json
import random
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

import torch

from bench.gpu_workloads import BLOCK, Lab, figure, greedy, rate, streamed
from bench.kv_host_gpu import SETTLES, copier_of
from bench.results import ROOT, percentiles, run, show
from bench.shapes import SHAPES, TINY
from minfer import LLM, AsyncLLM
from minfer.effects.execution.tiers.page_copier import PageCopier
from minfer.records.messages import Lost, Move, Moved
from minfer.records.tiers import BY_COST, CHOICES, LOAD, RECOMPUTE

ROWS: Final = 64
CONTEXT: Final = 1024  # tokens of a row that decodes
TOKENS: Final = 512  # that it outputs
PIECE: Final = 128  # pages of a transfer beside the steps
KNOWN: Final = 16_384  # tokens of the prompt that comes again
HOST: Final = 16 << 30  # bytes
LENGTHS: Final = (1024, 2048, 4096, 8192, 16_384)
POOL: Final = 640  # blocks, of which prompts that come again need twice as many
BLOCK_OF_TRACE: Final = 512  # tokens of an id in the Mooncake trace
TRACE: Final = ROOT.parent / "shared" / "traces" / "mooncake_conversation.jsonl"


def opened(lab: Lab, shape: str, args: argparse.Namespace, **more: Any) -> LLM:
    """An engine that has captured its graphs, and pinned its memory."""
    llm = lab.engine(shape, device="cuda" if args.gpu else "cpu", **more)
    time.sleep(SETTLES if args.gpu else 0.0)
    return llm


def between(times: list[list[float]]) -> list[float]:
    """ms between tokens of all rows, without the first ones, while rows are added."""
    gaps = list[float]()
    for row in times:
        gaps += [1e3 * (b - a) for a, b in pairwise(row[64:])]
    return gaps


def decoding(lab: Lab, llm: LLM, context: int, tokens: int = TOKENS) -> list[list[float]]:
    """When tokens of `ROWS` rows came."""
    return streamed(llm, lab.prompts(ROWS, context), [greedy(tokens)] * ROWS)


def idle(lab: Lab, shape: str, args: argparse.Namespace) -> dict[str, Any]:
    """Without, with, and without again: engines differ a little, too."""
    rates = defaultdict[str, list[float]](list)
    for name, tier in (("off", {}), ("on", {"kv_host_memory": args.host}), ("off", {})):
        more = {"enable_prefix_caching": True, "max_num_seqs": 256}
        llm = opened(lab, shape, args, **more, **tier)
        for number in range(args.repeats + 1):
            prompts = lab.prompts(ROWS, args.context // 2)
            found = rate(llm, prompts, [greedy(args.context // 2)] * ROWS)
            rates[name] += [found] * (number > 0)
        lab.close()
    on, off = (sorted(rates[name])[len(rates[name]) // 2] for name in ("on", "off"))
    return {**{k: figure(v, "tok/s") for k, v in rates.items()}, "on to off": on / off}


@contextmanager
def pages_moving(copier: PageCopier, pool: int) -> Iterator[Callable[[], float]]:
    """Transfers both ways without a pause, of the pool's last pages; gives how many GB/s
    there were. What rows have there is overwritten, which changes no times.
    """
    ended, over = SimpleQueue[Moved | Lost](), threading.Event()
    there = tuple(range(pool - PIECE, pool))
    moves = [
        Move(way, bool(way), *((there, there) if way else (there[::-1], there)))
        for way in (0, 1)
    ]
    done, began = [0], time.perf_counter()

    def go_on() -> None:
        for move in moves:
            copier.move(move, ended.put)
        while True:
            end = ended.get()
            assert isinstance(end, Moved), end
            done[0] += PIECE
            if over.is_set():
                return
            copier.move(moves[end.number], ended.put)

    thread = threading.Thread(target=go_on)
    thread.start()
    size = sum(part.page_bytes for part in copier.parts)
    try:
        yield lambda: done[0] * size / (time.perf_counter() - began) / 1e9
    finally:
        over.set()
        thread.join()
        time.sleep(0.2)  # the other way's last one


def moving(lab: Lab, shape: str, args: argparse.Namespace) -> dict[str, Any]:
    pages = ROWS * (args.context + TOKENS) // BLOCK + 2 * PIECE
    tier = {"kv_host_memory": args.host, "enable_prefix_caching": True}
    more = {"num_gpu_blocks_override": pages, "max_num_seqs": 256}
    llm = opened(lab, shape, args, **tier, **more)
    copier, rates = copier_of(llm), list[float]()
    decoding(lab, llm, args.context)
    gaps = defaultdict[str, list[float]](list)
    p99 = defaultdict[str, list[float]](list)
    for _ in range(args.repeats):
        for name in ("still", "moving"):
            if name == "moving":
                with pages_moving(copier, min(pages, copier.parts[0].host.pages)) as so:
                    found = between(decoding(lab, llm, args.context))
                    rates.append(so())
            else:
                found = between(decoding(lab, llm, args.context))
            gaps[name] += found
            p99[name].append(percentiles(found)["p99"])
    each = [a / b for a, b in zip(p99["moving"], p99["still"], strict=True)]
    return {
        **{name: {"unit": "ms", **percentiles(one)} for name, one in gaps.items()},
        "p99 moving to still": figure(each, "ratio"),
        "GB/s both ways": figure(rates, "GB/s"),
    }


def first(lab: Lab, shape: str, args: argparse.Namespace) -> dict[str, Any]:
    """First tokens of a known prompt, beside rows that decode all the time."""
    pool = (ROWS * (args.context + 4 * TOKENS) + 2 * args.known) // BLOCK
    found = dict[str, Any]()
    for choice in (LOAD, RECOMPUTE):
        llm = opened(
            lab,
            shape,
            args,
            enable_prefix_caching=True,
            num_gpu_blocks_override=pool,
            kv_host_memory=args.host,
            kv_host_choice=choice,
        )
        [prompt] = lab.prompts(1, args.known)
        served(llm, [prompt])
        work = partial(decoding, lab, llm, args.context, 4 * TOKENS)
        rows = threading.Thread(target=work)
        took = list[float]()
        for number in range(args.repeats + 1):
            served(llm, lab.prompts(3, args.known))  # pushes it out
            if not number:
                rows.start()
                time.sleep(2.0)  # all rows decode
            ms = served(llm, [prompt])
            took += [ms] * (number > 0 and rows.is_alive())
        rows.join()
        found["loaded" if choice == LOAD else "computed"] = took
    ratio = min(found["loaded"]) / min(found["computed"])
    return {
        **{name: figure(ms, "ms") for name, ms in found.items()},
        "loaded to computed": ratio,
    }


def served(llm: LLM, prompts: list[list[int]], tokens: int = 1) -> float:
    """ms until all prompts have their tokens."""
    begin = time.perf_counter()
    llm.generate(prompts, [greedy(tokens)] * len(prompts), use_tqdm=False)
    return 1e3 * (time.perf_counter() - begin)


def choice(lab: Lab, shape: str, args: argparse.Namespace) -> dict[str, Any]:
    seconds = defaultdict[str, dict[int, list[float]]](lambda: defaultdict(list))
    costs = dict[str, Any]()
    for one in (LOAD, RECOMPUTE, BY_COST):
        llm = opened(
            lab,
            shape,
            args,
            enable_prefix_caching=True,
            num_gpu_blocks_override=args.pool,
            max_model_len=2 * max(args.lengths),
            kv_host_memory=args.host,
            kv_host_choice=one,
        )
        tier = llm.worker.driver.config.host
        assert tier is not None
        names = ("load_seconds", "page_seconds", "token_seconds")
        costs = {name: getattr(tier, name) for name in names}
        for length in args.lengths:
            prompts = lab.prompts(2 * args.pool * BLOCK // length, length)
            for number in range(args.repeats + 1):  # in a round each is pushed out
                begin = time.perf_counter()
                for at in range(0, len(prompts), 8):
                    served(llm, prompts[at : at + 8], 4)
                took = time.perf_counter() - begin
                seconds[one][length] += [took] * (number > 0)
    table = dict[str, Any]()
    for length in args.lengths:
        each = {one: min(seconds[one][length]) for one in CHOICES}
        fixed = each[LOAD], each[RECOMPUTE]
        table[str(length)] = {
            **each,
            "cost to the better": min(fixed) / each[BY_COST],
            "cost to the worse": max(fixed) / each[BY_COST],
        }
    return {
        "seconds of a round": table,
        "costs": costs,
        "break-even tokens": break_even(costs),
    }


def break_even(costs: dict[str, float]) -> float:
    """Tokens of a prefix, from which it is loaded."""
    gain = costs["token_seconds"] - costs["page_seconds"] / BLOCK
    return costs["load_seconds"] / gain if gain > 0 else float("inf")


# --- the Mooncake trace -----------------------------------------------------------------


def conversations(
    count: int, scale: int, words: int
) -> list[tuple[float, list[int], int]]:
    """Requests: arrival in seconds, tokens, and output tokens."""
    found, size = list[tuple[float, list[int], int]](), BLOCK_OF_TRACE // scale
    with TRACE.open() as lines:
        for line in lines:
            one = json.loads(line)
            tokens = list[int]()
            for name in one["hash_ids"]:
                dice = random.Random(name)
                tokens += dice.choices(range(1, words), k=size)
            tokens = tokens[: max(1, one["input_length"] // scale)]
            output = max(1, one["output_length"] // scale)
            found.append((one["timestamp"] / 1e3, tokens, output))
            if len(found) == count:
                break
    return found


async def replayed(
    llm: AsyncLLM, work: list[tuple[float, list[int], int]], speed: float
) -> list[float]:
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


def mooncake(lab: Lab, shape: str, args: argparse.Namespace) -> dict[str, Any]:
    work = conversations(args.requests, args.scale, lab.words)
    found = dict[str, Any]()
    lab.close()
    for name, tier in (("without", {}), ("with", {"kv_host_memory": 4 * args.host})):
        settings: dict[str, Any] = {
            "load_format": "dummy",
            "device": "cuda" if args.gpu else "cpu",
            "num_gpu_blocks_override": args.mooncake_pool,
            "max_model_len": min(32_768, args.mooncake_pool * BLOCK),
            "max_num_seqs": 256,
        }

        async def served_all(
            settings: dict[str, Any] = settings | tier,
        ) -> tuple[list[float], dict[str, float], float]:
            llm = AsyncLLM(lab.model(shape), **settings)
            await asyncio.sleep(SETTLES if args.gpu else 0)
            warm = [(0.0, [at] * 600, 8) for at in range(1, 9)]
            await replayed(llm, warm, 1.0)
            began = time.perf_counter()
            ms = await replayed(llm, work, args.speed)
            took = time.perf_counter() - began
            counts = dict(llm.client.snapshot().totals.counts)
            llm.close()
            return ms, counts, took

        ms, counts, took = asyncio.run(served_all())
        out = sum(output for *_, output in work)
        prompts = sum(len(tokens) for _, tokens, _ in work)
        found[name] = {
            "first token, ms": percentiles(ms),
            "output tokens/s": out / took,
            "prompt tokens": prompts,
            "seconds": took,
            "hit share": counts["prefix_cache_hits"] / counts["prompt_tokens"],
            "counts": {k: v for k, v in counts.items() if v and k.startswith("kv_")},
        }
        show({name: found[name]})
    return found


PARTS: Final = {
    "idle": idle,
    "moving": moving,
    "first": first,
    "choice": choice,
    "mooncake": mooncake,
}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The parts that are asked for."""
    args.gpu = torch.cuda.is_available()
    found = dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        words = 2000 if args.shape in TINY else 100_000
        lab = Lab(Path(folder), random.Random(0), words=words)
        for name in args.parts.split(","):
            began = time.perf_counter()
            found[name] = PARTS[name](lab, args.shape, args)
            lab.close()
            show({name: found[name]})
            print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
    card = torch.cuda.get_device_name() if args.gpu else "CPU"
    return {"card": card, "shape": args.shape, **found}


def lengths(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


if __name__ == "__main__":
    run(
        "kv_tiers_gpu",
        measure,
        {
            "--shape": {"choices": [*SHAPES, *TINY], "default": "7B"},
            "--parts": ",".join(PARTS),
            "--repeats": 3,
            "--host": HOST,
            "--context": CONTEXT,
            "--known": KNOWN,
            "--pool": POOL,
            "--lengths": {"type": lengths, "default": LENGTHS},
            "--requests": 300,
            "--scale": 4,
            "--speed": 1.0,
            "--mooncake-pool": 1500,
        },
    )

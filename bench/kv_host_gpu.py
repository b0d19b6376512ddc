"""KV blocks in host memory on a GPU: the rate of copies, and the first token of a known
prompt.

    python -m bench.kv_host_gpu --shape 7B

Random weights. The rate of copies is compared with torch's copies of pinned memory
(cudaMemcpyAsync) in the same process, in each direction alone and in both at once. The
first token is that of one prompt in an idle engine whose pool holds less than three of
them: computed, again at once, and again when the device has evicted it.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, cast

import torch

from bench.gpu_workloads import Lab, figure, greedy
from bench.results import run, show
from bench.shapes import SHAPES
from minfer import LLM
from minfer.effects.execution.tiers.page_copier import PageCopier
from minfer.effects.execution.torch_executor import TorchExecutor
from minfer.records.messages import Lost, Move, Moved
from minfer.records.tiers import TransferKind

RAW: Final = 1 << 30  # bytes of a copy of pinned memory
PAGES: Final = 256
PROMPT: Final = 16_384
POOL: Final = 600  # blocks of 64 tokens: two such prompts
NUM_FILLERS: Final = 3  # that push it out
HOST: Final = 8 << 30  # bytes
SETTLE_SECONDS: Final = 25.0  # seconds in which an idle engine captures graphs


def seconds(work: Callable[[], object], repeats: int) -> list[float]:
    """How long it takes, after a run that does not count."""
    times = list[float]()
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return times[1:]


def pinned_rates(repeats: int) -> dict[str, list[float]]:
    """GB/s of copies of pinned memory: out, in, and each way of both at once."""
    host = [torch.empty(RAW, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.empty(RAW, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]  # torch's

    def out(which: int = 0) -> None:
        with torch.cuda.stream(streams[which]):
            host[which].copy_(device[which], non_blocking=True)

    def into(which: int = 0) -> None:
        with torch.cuda.stream(streams[which]):
            device[which].copy_(host[which], non_blocking=True)

    def both() -> None:
        out(0)
        into(1)

    def done(way: Callable[[], None]) -> None:
        way()
        torch.cuda.synchronize()

    ways = {"out": out, "in": into, "both": both}
    return {
        name: [RAW / took / 1e9 for took in seconds(partial(done, way), repeats)]
        for name, way in ways.items()
    }


def copier_of(llm: LLM, *, settled: bool = False) -> PageCopier:
    copiers = cast(TorchExecutor, llm.worker.driver.executor).copiers
    assert copiers is not None
    copier = copiers.host
    assert copier is not None
    copier.growing.join()  # all host memory is pinned
    time.sleep(SETTLE_SECONDS if torch.cuda.is_available() and not settled else 0.0)
    return copier


def copied(copier: PageCopier, moves: Sequence[Move]) -> None:
    """Make these transfers, all at once."""
    ended = SimpleQueue[Moved | Lost]()
    for move in moves:
        copier.move(move, ended.put)
    for _ in moves:
        assert isinstance(ended.get(), Moved)


def page_rates(llm: LLM, repeats: int) -> dict[str, list[float]]:
    """GB/s of the engine's transfers, as in `pinned_rates`."""
    copier, size = copier_of(llm), llm.setup.memory.block_bytes
    first, second = tuple(range(PAGES)), tuple(range(PAGES, 2 * PAGES))
    out = Move(1, TransferKind.STORE_TO_HOST, first, first)
    into = Move(2, TransferKind.LOAD_FROM_HOST, second, second)
    ways = {"out": [out], "in": [into], "both": [out, into]}
    return {
        name: [
            PAGES * size / took / 1e9
            for took in seconds(partial(copied, copier, moves), repeats)
        ]
        for name, moves in ways.items()
    }


def first_tokens(lab: Lab, llm: LLM, repeats: int) -> dict[str, list[float]]:
    """ms to the first token of a prompt: computed, cached, and from host memory."""
    times: dict[str, list[float]] = {"computed": [], "on the device": [], "on host": []}

    def served(prompts: list[list[int]]) -> float:
        begin = time.perf_counter()
        llm.generate(prompts, [greedy(1)] * len(prompts), use_tqdm=False)
        return 1e3 * (time.perf_counter() - begin)

    for number in range(repeats + 1):
        [prompt] = lab.prompts(1, PROMPT)
        took = [served([prompt]), served([prompt])]
        served(lab.prompts(NUM_FILLERS, PROMPT))
        time.sleep(0.5)  # all is stored
        before = llm.worker.snapshot().totals.counts["kv_host_loaded_blocks"]
        took.append(served([prompt]))
        after = llm.worker.snapshot().totals.counts["kv_host_loaded_blocks"]
        assert after - before == PROMPT // 64 - 1
        for values, ms in zip(times.values(), took, strict=True):
            values += [ms] * (number > 0)
    return times


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All parts."""
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(Path(folder), random.Random(0))
        raw = pinned_rates(args.repeats)
        torch.cuda.empty_cache()
        shared = {"enable_prefix_caching": True, "num_gpu_blocks_override": POOL}
        tier = {"kv_host_memory": HOST, "kv_host_choice": "load"}
        llm = lab.engine(args.shape, **shared, **tier)
        rates = page_rates(llm, args.repeats)
        results: dict[str, Any] = {
            "copies": {
                name: {
                    "pinned memory": figure(raw[name], "GB/s"),
                    "pages": figure(rates[name], "GB/s"),
                    "share": max(rates[name]) / max(raw[name]),
                }
                for name in raw
            }
        }
        show(results["copies"])
        tokens = first_tokens(lab, llm, args.repeats)
        results["first_token"] = {name: figure(ms, "ms") for name, ms in tokens.items()}
        show({"first token": results["first_token"]})
        lab.close()
    return {"card": torch.cuda.get_device_name(), **results}


if __name__ == "__main__":
    run(
        "kv_host_gpu",
        measure,
        {
            "--shape": {"choices": [*SHAPES], "default": "7B"},
            "--repeats": 3,
        },
    )

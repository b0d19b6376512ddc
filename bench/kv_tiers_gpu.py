"""What KV blocks in host memory cost and gain while others are served, on a GPU.

    python -m bench.kv_tiers_gpu --parts first,moving,idle,choice,break_even

Random weights. The parts, of which the first three share an engine:

- idle: throughput of 64 rows with the tier, against without; nothing is loaded.
- moving: time between tokens of 64 rows while pages cross the bus both ways without a
  pause, against without (but for those that rows fill, which are stored).
- first: the first token of a known prompt of 16k tokens beside 64 rows that decode: from
  host memory, against computed.
- choice: prompts that come again and again, of which the pool holds half: seconds of a
  round if they are always loaded, never, or by cost, for five lengths.
- break_even: the measured costs of loads and of computing, for three kinds of attention,
  and from how many tokens on a prefix is loaded.
"""

import argparse
import json
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from queue import SimpleQueue
from statistics import median
from typing import Any, Final

import torch
from attrs import evolve

from bench import layers_gpu
from bench.gpu_workloads import BLOCK, Lab, figure, greedy, rate, streamed
from bench.kv_host_gpu import SETTLE_SECONDS, copier_of
from bench.layers_gpu import tiny
from bench.results import percentiles, run, show, write
from bench.shapes import SHAPES, TINY, qwen
from minfer import LLM
from minfer.effects.execution.tiers.page_copier import PageCopier
from minfer.records.messages import Lost, Move, Moved
from minfer.records.tiers import BY_COST, CHOICES, LOAD, RECOMPUTE, TransferKind

ROWS: Final = 64
CONTEXT: Final = 1024  # tokens of a row that decodes
TOKENS: Final = 512  # that it outputs
TRANSFER_PAGES: Final = 128  # pages of a transfer beside the steps
REPEATED_PROMPT_TOKENS: Final = 16_384  # tokens of the prompt that comes again
HOST: Final = 24 << 30  # bytes
LENGTHS: Final = (1024, 2048, 4096, 8192, 16_384)
POOL: Final = 640  # blocks, of which prompts that come again need twice as many
ATTENTION: Final[dict[str, dict[str, Any] | None]] = {
    "GQA": None,  # the shape that is asked for
    "MHA": {  # Llama 2 7B
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32_000,
    },
    "MLA": layers_gpu.SHAPES["mla"],  # DeepSeek-V2-Lite
}


def opened(lab: Lab, shape: str, args: argparse.Namespace, **settings: Any) -> LLM:
    """An engine that has captured its graphs, and pinned its memory."""
    before = lab.llm
    llm = lab.engine(shape, device="cuda" if args.gpu else "cpu", **settings)
    if llm is before:
        return llm
    if settings.get("kv_host_memory"):
        copier_of(llm)  # waits
    else:
        time.sleep(SETTLE_SECONDS if args.gpu else 0.0)
    return llm


def shared(args: argparse.Namespace) -> dict[str, Any]:
    """Settings of the engine of several parts: room for all rows and two known prompts;
    host memory holds all of them, and those that push them out.
    """
    pool = (ROWS * (args.context + TOKENS) + 2 * args.known) // BLOCK
    return {"enable_prefix_caching": True, "num_gpu_blocks_override": pool}


def gaps(times: list[list[float]]) -> dict[str, float]:
    """ms between tokens of all rows, without the first ones, while rows are added; and
    between tokens of which the second is the first in its block.
    """
    intervals = [1e3 * (b - a) for row in times for a, b in pairwise(row[64:])]
    new = [
        1e3 * (row[index] - row[index - 1])
        for row in times
        for index in range(128, len(row), 64)
    ]
    return {
        **percentiles(intervals),
        "longest": max(intervals),
        "in new blocks": median(new),
    }


def decoding(lab: Lab, llm: LLM, context: int, tokens: int = TOKENS) -> list[list[float]]:
    """When tokens of `ROWS` rows came."""
    return streamed(llm, lab.prompts(ROWS, context), [greedy(tokens)] * ROWS)


def idle(lab: Lab, shape: str, args: argparse.Namespace) -> dict[str, Any]:
    rates = dict[str, list[float]]()
    for name, tier in (("on", {"kv_host_memory": args.host}), ("off", {})):
        llm, speeds = opened(lab, shape, args, **shared(args), **tier), list[float]()
        for _ in range(args.repeats + 1):
            prompts = lab.prompts(ROWS, args.context)
            speeds.append(rate(llm, prompts, [greedy(TOKENS)] * ROWS))
        rates[name] = speeds[1:]
        del llm
    return {
        **{name: figure(values, "tok/s") for name, values in rates.items()},
        "on to off": median(rates["on"]) / median(rates["off"]),
    }


@contextmanager
def pages_moving(copier: PageCopier, pool: int) -> Iterator[Callable[[], float]]:
    """Transfers both ways without a pause, of the pool's last pages; gives how many GB/s
    there were. What rows have there is overwritten, which changes no times.
    """
    ended, over = SimpleQueue[Moved | Lost](), threading.Event()
    pages = tuple(range(pool - TRANSFER_PAGES, pool))
    moves = [
        Move(0, TransferKind.STORE_TO_HOST, pages[::-1], pages),
        Move(1, TransferKind.LOAD_FROM_HOST, pages, pages),
    ]
    moved, began = [0], time.perf_counter()

    def go_on() -> None:
        for move in moves:
            copier.move(move, ended.put)
        while True:
            end = ended.get()
            assert isinstance(end, Moved), end
            moved[0] += TRANSFER_PAGES
            if over.is_set():
                return
            copier.move(moves[end.number], ended.put)

    thread = threading.Thread(target=go_on)
    thread.start()
    size = sum(page_tensor.page_bytes for page_tensor in copier.tensors)
    try:
        yield lambda: moved[0] * size / (time.perf_counter() - began) / 1e9
    finally:
        over.set()
        thread.join()
        time.sleep(0.2)  # the other way's last one


def moving(lab: Lab, shape: str, args: argparse.Namespace) -> dict[str, Any]:
    llm = opened(lab, shape, args, **shared(args), kv_host_memory=args.host)
    pages = llm.setup.config.num_blocks
    copier, rates = copier_of(llm, settled=True), list[float]()
    decoding(lab, llm, args.context)
    runs = defaultdict[str, list[dict[str, Any]]](list)
    for _ in range(args.repeats):
        runs["still"].append(gaps(decoding(lab, llm, args.context)))
        with pages_moving(copier, min(pages, copier.tensors[0].host.pages)) as so:
            runs["moving"].append(gaps(decoding(lab, llm, args.context)))
            rates.append(so())
    ratios = [
        {p: a[p] / b[p] for p in ("p50", "p99")}
        for a, b in zip(runs["moving"], runs["still"], strict=True)
    ]
    return {
        **{
            f"{name}, {p}": figure([gap[p] for gap in run_gaps], "ms")
            for name, run_gaps in runs.items()
            for p in ("p50", "p99")
        },
        "p50 moving to still": figure([ratio["p50"] for ratio in ratios], "ratio"),
        "p99 moving to still": figure([ratio["p99"] for ratio in ratios], "ratio"),
        "GB/s both ways": figure(rates, "GB/s"),
        "runs": runs,
    }


@contextmanager
def choosing(llm: LLM, choice: str) -> Iterator[Callable[[], int]]:
    """Have an idle engine choose so; gives how many blocks it has loaded since."""
    driver = llm.worker.driver
    config = driver.config
    assert config.host is not None
    driver.config = evolve(config, host=evolve(config.host, choice=choice))

    def loaded() -> int:
        return int(llm.worker.snapshot().totals.counts["kv_host_loaded_blocks"])

    before = loaded()
    yield lambda: loaded() - before


def first(lab: Lab, shape: str, args: argparse.Namespace) -> dict[str, Any]:
    """First tokens of known prompts, each asked for once, beside rows that decode all the
    time.
    """
    num_blocks, repeats = args.known // BLOCK, args.repeats + 1
    llm = opened(lab, shape, args, **shared(args), kv_host_memory=args.host)
    pool = llm.setup.config.num_blocks
    prompts = lab.prompts(2 * repeats, args.known)
    fillers = lab.prompts(pool // num_blocks + 1, args.known)  # push them out
    solo, beside = (dict[str, list[float]]({LOAD: [], RECOMPUTE: []}) for _ in range(2))
    for prompt in prompts + fillers:
        solo[RECOMPUTE].append(served(llm, [prompt]))
    for prompt in fillers[:repeats]:
        with choosing(llm, LOAD) as loaded:
            solo[LOAD].append(served(llm, [prompt]))
            assert loaded() == num_blocks - 1, loaded()
    rows = threading.Thread(target=decoding, args=(lab, llm, args.context))
    rows.start()
    time.sleep(2.0 if args.gpu else 0.5)  # all rows decode
    for number, prompt in enumerate(prompts):
        choice = (LOAD, RECOMPUTE)[number % 2]
        with choosing(llm, choice) as loaded:
            beside[choice].append(served(llm, [prompt]))
            assert loaded() == (num_blocks - 1) * (choice == LOAD), loaded()
        assert rows.is_alive(), f"rows ended before prompt {number}"
    rows.join()
    results = dict[str, Any]()
    for setting, times in (("alone", solo), ("beside rows", beside)):
        ms = {name: values[1:] for name, values in times.items()}
        results[setting] = {
            "loaded": figure(ms[LOAD], "ms"),
            "computed": figure(ms[RECOMPUTE], "ms"),
            "loaded to computed": median(ms[LOAD]) / median(ms[RECOMPUTE]),
        }
    return results


def served(llm: LLM, prompts: list[list[int]], tokens: int = 1) -> float:
    """ms until all prompts have their tokens."""
    begin = time.perf_counter()
    llm.generate(prompts, [greedy(tokens)] * len(prompts), use_tqdm=False)
    return 1e3 * (time.perf_counter() - begin)


def choice(lab: Lab, shape: str, args: argparse.Namespace) -> dict[str, Any]:
    llm = opened(
        lab,
        shape,
        args,
        enable_prefix_caching=True,
        num_gpu_blocks_override=args.pool,
        max_model_len=2 * max(args.lengths),
        kv_host_memory=args.host,
    )
    table = dict[str, Any]()
    for length in args.lengths:
        prompts = lab.prompts(2 * args.pool * BLOCK // length, length)
        rounds = defaultdict[str, list[float]](list)
        blocks = defaultdict[str, list[int]](list)
        for _ in range(args.repeats + 1):
            for policy in CHOICES:
                with choosing(llm, policy) as loaded:
                    began = time.perf_counter()
                    for start in range(0, len(prompts), 8):
                        served(llm, prompts[start : start + 8], 4)
                    rounds[policy].append(time.perf_counter() - began)
                    blocks[policy].append(loaded())
        medians = {
            policy: median(rounds[policy][1:]) for policy in CHOICES
        }  # at first none is known
        fixed = medians[LOAD], medians[RECOMPUTE]
        table[str(length)] = {
            **{policy: figure(rounds[policy][1:], "s") for policy in CHOICES},
            "blocks loaded": {policy: sum(blocks[policy][1:]) for policy in CHOICES},
            "cost to the better": min(fixed) / medians[BY_COST],
            "cost to the worse": max(fixed) / medians[BY_COST],
        }
        show({str(length): table[str(length)]})
    return {"rounds": table, "costs": costs_of(llm)}


def costs_of(llm: LLM) -> dict[str, float]:
    """What the engine has measured, in seconds, and tokens of a prefix from which on it
    is loaded.
    """
    tier, memory = llm.worker.driver.config.host, llm.setup.memory
    assert tier is not None
    names = ("load_seconds", "page_seconds", "token_seconds")
    costs: dict[str, float] = {name: getattr(tier, name) for name in names}
    gain = tier.token_seconds - tier.page_seconds / BLOCK
    tokens = tier.load_seconds / gain if gain > 0 else float("inf")
    return {**costs, "page_bytes": memory.block_bytes, "break-even tokens": tokens}


def break_even(lab: Lab, shape: str, args: argparse.Namespace) -> dict[str, Any]:
    results = dict[str, Any]()
    for name, config in ATTENTION.items():
        folder = lab.folder / name.replace(" ", "_")
        folder.mkdir()
        config = config or qwen(shape)
        (folder / "config.json").write_text(
            json.dumps(layers_gpu.COMMON | (config if args.gpu else tiny(config)))
        )
        lab.close()
        lab.llm = LLM(
            str(folder),
            device="cuda" if args.gpu else "cpu",
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=16_384 if args.gpu else 512,
            kv_host_memory=min(args.host, 1 << 30),
        )
        results[name] = costs_of(lab.llm)
        show({name: results[name]})
    return results


PARTS: Final = {
    "first": first,
    "moving": moving,
    "idle": idle,
    "choice": choice,
    "break_even": break_even,
}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The parts that are asked for."""
    args.gpu = torch.cuda.is_available()
    card = torch.cuda.get_device_name() if args.gpu else "CPU"
    results: dict[str, Any] = {"card": card, "shape": args.shape}
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab.for_shape(folder, args.shape)
        for name in args.parts.split(","):
            began = time.perf_counter()
            results[name] = PARTS[name](lab, args.shape, args)
            show({name: results[name]})
            print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
            write(args.name, results, folder=args.folder)  # a later part may fail
        lab.close()
    return results


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
            "--known": REPEATED_PROMPT_TOKENS,
            "--pool": POOL,
            "--lengths": {"type": lengths, "default": LENGTHS},
        },
    )

"""KV blocks on disk: rates of their files, and the first token of a known prompt after a
restart.

    python -m bench.kv_disk_gpu --shape 7B --disk /path/on/the/disk
    python -m bench.kv_disk_gpu --shape bundled --device cpu --prompt 448

Random weights, or the bundled model's. Rates are those of the engine's transfers, and of
one file that is as large as all of their blocks, written and read by one thread, in the
same folder. Nothing that is written is waited for until it is on the disk, as in the
engine. "From the page cache" is right after that; "from the disk" is once the files are
on it and the operating system was asked to forget them (fsync and posix_fadvise, file by
file: no other program's cache is dropped; a disk may have memory of its own).

First tokens are those of an idle engine: computed, on the device, and then, in an engine
that was started anew, from the disk, from the page cache, and, once other prompts have
taken its place on the device, from host memory.
"""

import argparse
import os
import random
import secrets
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, cast

import torch

from bench.gpu_workloads import Lab, figure, greedy
from bench.results import run, show
from bench.shapes import SHAPES
from minfer import LLM
from minfer.blocks.keys import DIGEST
from minfer.effects.execution.tiers.block_folder import STORED, BlockFolder
from minfer.effects.execution.tiers.keyed_copier import KeyedCommand, KeyedCopier
from minfer.effects.execution.torch_executor import TorchExecutor
from minfer.records.messages import FetchBlocks, Lost, Moved, StoreBlocks

PAGES: Final = 256
BLOCK: Final = 64  # tokens
NUM_FILLERS: Final = 3  # prompts that push one out
HOST: Final = 8 << 30  # bytes
DISK: Final = 64 << 30
SETTLE_SECONDS: Final = 25.0  # seconds in which an idle GPU engine captures graphs
CHUNK: Final = 1 << 24  # bytes of a write or a read of the one large file

BUNDLED: Final = "bundled"


def engine(lab: Lab, args: argparse.Namespace, **tiers: Any) -> LLM:
    """A new engine; its pool holds less than three prompts."""
    pool = 5 * -(-args.prompt // BLOCK) // 2
    settings = {
        "device": args.device,
        "block_size": BLOCK,
        "max_model_len": args.prompt + BLOCK,
        "num_gpu_blocks_override": pool,
        "kv_disk": args.disk,
        "kv_disk_size": min(DISK, args.disk_size),
        **tiers,
    }
    if args.shape == BUNDLED:
        llm = LLM(**settings)
    else:
        llm = LLM(lab.model(args.shape), load_format="dummy", **settings)
    if args.device == "cuda":
        time.sleep(args.settles)
    return llm


def forget(folder: Path) -> None:
    """Have the operating system forget all files of a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def rate(size: int, work: Callable[[], object]) -> float:
    """GB/s of a work on `size` bytes."""
    begin = time.perf_counter()
    work()
    return size / (time.perf_counter() - begin) / 1e9


# --- files ------------------------------------------------------------------------------


def write_file(path: Path, size: int, data: memoryview) -> None:
    with path.open("wb", buffering=0) as file:
        for _ in range(0, size, len(data)):
            file.write(data)


def read_file(path: Path, into: memoryview) -> None:
    with path.open("rb", buffering=0) as file:
        while file.readinto(into):
            pass


def file_rates(folder: Path, size: int, repeats: int) -> dict[str, list[float]]:
    """GB/s of one large file."""
    rates: dict[str, list[float]] = {"out": [], "page cache": [], "disk": []}
    data, path = memoryview(bytearray(os.urandom(CHUNK))), folder / "large"
    for _ in range(repeats):
        rates["out"].append(rate(size, partial(write_file, path, size, data)))
        rates["page cache"].append(rate(size, partial(read_file, path, data)))
        forget(folder)
        rates["disk"].append(rate(size, partial(read_file, path, data)))
        path.unlink()
    return rates


def copied(copier: KeyedCopier, command: KeyedCommand) -> None:
    ended = SimpleQueue[Moved | Lost]()
    copier.move(command, ended.put)
    end = ended.get()
    assert isinstance(end, Moved), end


def block_rates(llm: LLM, repeats: int) -> tuple[int, dict[str, list[float]]]:
    """Bytes of the blocks that are moved, and GB/s of transfers."""
    copiers = cast(TorchExecutor, llm.worker.driver.executor).copiers
    assert copiers is not None
    copier = copiers.keyed
    assert copier is not None
    folder = copier.store
    assert isinstance(folder, BlockFolder)
    count = min(PAGES, llm.setup.config.num_blocks)
    size = count * llm.setup.memory.block_bytes
    pages = tuple((page,) for page in range(count))
    rates: dict[str, list[float]] = {"out": [], "page cache": [], "disk": []}
    for _ in range(repeats + 1):
        keys = tuple(secrets.token_bytes(DIGEST) for _ in pages)
        store, fetch = StoreBlocks(-1, keys, pages), FetchBlocks(-1, keys, pages)
        rates["out"].append(rate(size, partial(copied, copier, store)))
        rates["page cache"].append(rate(size, partial(copied, copier, fetch)))
        folder.uncache(keys)
        rates["disk"].append(rate(size, partial(copied, copier, fetch)))
        folder.remove(keys)
    return size, {name: values[1:] for name, values in rates.items()}


# --- first tokens -----------------------------------------------------------------------


def served(llm: LLM, prompt: list[int]) -> float:
    """ms to a prompt's first token."""
    begin = time.perf_counter()
    llm.generate([prompt], [greedy(1)], use_tqdm=False)
    return 1e3 * (time.perf_counter() - begin)


def stored(llm: LLM, blocks: int) -> None:
    """Wait until `blocks` blocks are written."""
    while llm.worker.snapshot().totals.counts[STORED] < blocks:
        time.sleep(0.05)


def loaded(llm: LLM, prompt: list[int], tier: str) -> float:
    """ms to the first token of a prompt, all of which a tier has."""
    name = f"kv_{tier}_loaded_blocks"
    before = llm.worker.snapshot().totals.counts[name]
    took = served(llm, prompt)
    after = llm.worker.snapshot().totals.counts[name]
    assert after - before == (len(prompt) - 1) // BLOCK, (before, after)
    return took


def first_tokens(
    lab: Lab, args: argparse.Namespace, first: LLM
) -> dict[str, list[float]]:
    """ms to a first token, by where the KV of the prompt comes from."""
    vocab = first.setup.spec.vocab_size
    count = 2 * (args.repeats + 1)  # the first of each half does not count
    prompts = [lab.rng.choices(range(1, vocab), k=args.prompt) for _ in range(count)]
    times: dict[str, list[float]] = {"computed": [], "on the device": []}
    with closing(first) as llm:
        blocks = int(llm.worker.snapshot().totals.counts[STORED])
        for prompt in prompts:
            times["computed"].append(served(llm, prompt))
            times["on the device"].append(served(llm, prompt))
            blocks += args.prompt // BLOCK
            stored(llm, blocks)
    times = {name: values[2:] for name, values in times.items()}
    tiers = {"kv_disk_choice": "load", "kv_host_memory": args.host}
    with closing(engine(lab, args, **tiers)) as llm:
        half = count // 2
        disk, cached = list[float](), list[float]()
        for prompt in prompts[:half]:
            forget(args.disk)
            disk.append(loaded(llm, prompt, "keyed"))
        for prompt in prompts[half:]:
            cached.append(loaded(llm, prompt, "keyed"))
    times |= {"from the disk": disk[1:], "from the page cache": cached[1:]}
    show({name: figure(ms, "ms") for name, ms in times.items()})
    with closing(
        engine(
            lab,
            args,
            kv_disk_choice="recompute",
            kv_host_memory=args.host,
            kv_host_choice="load",
        )
    ) as llm:
        host = list[float]()
        for number in range(half):
            fillers = [
                prompts[(number + offset) % count] for offset in range(NUM_FILLERS + 1)
            ]
            for prompt in fillers:
                served(llm, prompt)
            time.sleep(0.5)  # all is stored
            host.append(loaded(llm, prompts[number], "host"))
    return times | {"from host memory": host[1:]}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All parts."""
    with (
        tempfile.TemporaryDirectory() as models,
        tempfile.TemporaryDirectory(dir=args.disk) as disk,
    ):
        lab, args.disk = Lab(Path(models), random.Random(0)), Path(disk)
        llm = engine(lab, args, kv_disk_choice="recompute")
        block = llm.setup.memory.block_bytes
        size, rates = block_rates(llm, args.repeats)
        raw_folder = args.disk / "00"
        raw_folder.mkdir(exist_ok=True)
        raw = file_rates(raw_folder, size, args.repeats)
        results: dict[str, Any] = {
            "rates": {
                name: {
                    "one file": figure(raw[name], "GB/s"),
                    "blocks": figure(rates[name], "GB/s"),
                    "share": max(rates[name]) / max(raw[name]),
                }
                for name in raw
            }
        }
        show(results["rates"])
        tokens = first_tokens(lab, args, llm)
        results["first_token"] = {name: figure(ms, "ms") for name, ms in tokens.items()}
        show({"first token": results["first_token"]})
    card = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    return {"card": card, "block_bytes": block, "prompt": args.prompt, **results}


if __name__ == "__main__":
    run(
        "kv_disk_gpu",
        measure,
        {
            "--shape": {"choices": [*SHAPES, BUNDLED], "default": "7B"},
            "--device": {"choices": ["cuda", "cpu"], "default": "cuda"},
            "--disk": {"type": Path, "default": None, "help": "a folder on the disk"},
            "--disk-size": DISK,
            "--host": HOST,
            "--prompt": 16_384,
            "--repeats": 3,
            "--settles": SETTLE_SECONDS,  # seconds
        },
    )

"""The first minute of a server and of a library: from the start until it is ready, and
the first load beside the second.

    python -m bench.first_minute [--again] [--shapes 0.5B 7B] [--clients 8 64 256]

Needs a CUDA GPU (`--device cpu --shapes tiny` tries it without). Each part is a process
of its own, with a shape of Qwen2.5 and random weights. `empty`: on a machine without
compiled kernels. `full`: the same again.

Clients: an `AsyncLLM` serves them, each with one request after the other (512 tokens in,
128 out), twice in a row, and once more after a rest, in which graphs are captured that no
request waits for. Rows: an `LLM` gets as many prompts at once, for each number twice.
Beside each load stands what its steps did that was not prepared
(`minfer.effects.execution.running.unprepared_work`); the lines of the first loads, which
name the requests, are in the result file. Targets: the first load has 0.9 of the second's
throughput, and the first use of a number of rows 0.8; a 7B is ready within 25 s without
compiled kernels, and within 12 s with them, and then none is compiled.

A part's name is its shape, its clients (0: rows), and `empty` or `full`. Parts that the
result file has are not measured again, unless `--again`.
"""

import argparse
import asyncio
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast
from unittest.mock import patch

from attrs import define, field

from bench.results import ROOT, circumstances, percentiles, run, show, write
from bench.shapes import qwen

if TYPE_CHECKING:  # a part imports torch once its clock runs
    from minfer.effects.execution.torch_executor import TorchExecutor

CLIENTS: Final = [8, 64, 256]
SHAPES: Final = ["0.5B", "7B"]
ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
REQUESTS_PER_CLIENT: Final = 8  # at most, one after the other
MAX_REQUESTS: Final = 1024  # of a load
TOKENS_IN: Final = 512
TOKENS_OUT: Final = 128
REST_SECONDS: Final = 4.0  # seconds before the last load
SEED: Final = 0
CACHES: Final = ("empty", "full")
LIMIT_SECONDS: Final = 400.0  # seconds of a part
MAX_LINES: Final = 300  # of the log, in a result
CHILD: Final = "MINFER_FIRST_MINUTE"  # a part's job, in its process's environment
SETTINGS: Final[dict[str, Any]] = {
    "load_format": "dummy",
    "max_num_seqs": 256,
    "max_model_len": 1024,
    "enable_prefix_caching": False,
}


# --- a part, in its own process ---------------------------------------------------------


@define
class Watch:
    """What a process did when, since it was started."""

    began: float
    rng: random.Random
    words: range  # token ids of prompts
    stages: dict[str, Any] = field(factory=dict)
    compiled: list[str] = field(factory=list)
    lines: list[str] = field(factory=list)

    def now(self) -> float:
        return time.time() - self.began

    def prompts(self, count: int) -> list[list[int]]:
        return [self.rng.choices(self.words, k=TOKENS_IN) for _ in range(count)]

    def report(self, progress: Any) -> None:
        stage = self.stages.setdefault(progress.stage, {"from": self.now()})
        stage |= {"to": self.now(), "done": progress.done, "of": progress.total}

    def listen(self, *, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            self.compiled.append(src.name)

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep a line of the executor's log."""
        text = record.getMessage()
        if text.startswith("step ") and len(self.lines) < MAX_LINES:
            self.lines.append(text)
        return record.levelno > logging.DEBUG

    def opened(self, make: Callable[..., Any], job: dict[str, Any]) -> Any:
        """Open an engine, and note its start."""
        from triton import knobs

        from minfer.effects.live.engine import open_engine as opening

        knobs.compilation.listener = self.listen
        log = logging.getLogger("minfer.executor")
        log.setLevel(logging.DEBUG)
        log.addFilter(self.filter)
        plain = opening.open_executor

        def watched(setup: Any, tokenizer: Any, _: Any, *others: Any) -> Any:
            return plain(setup, tokenizer, self.report, *others)

        with patch.object(opening, "open_executor", watched):
            return make(job["model"], device=job["device"], **SETTINGS)


async def client(llm: Any, prompts: list[list[int]], firsts: list[float]) -> int:
    """One request after the other; returns how many tokens came."""
    from minfer import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=TOKENS_OUT, ignore_eos=True)
    tokens = 0
    for prompt in prompts:
        begin, first = time.perf_counter(), 0.0
        async for output in llm.generate_deltas(prompt, params):
            first = first or time.perf_counter() - begin
            tokens += len(output.outputs[0].token_ids)
        firsts.append(first)
    return tokens


async def load(llm: Any, watch: Watch, clients: int) -> dict[str, Any]:
    """All clients at once; what they saw."""
    each = min(REQUESTS_PER_CLIENT, MAX_REQUESTS // clients)
    prompts = [watch.prompts(each) for _ in range(clients)]
    firsts, begin = list[float](), time.perf_counter()
    tokens = await asyncio.gather(*(client(llm, asked, firsts) for asked in prompts))
    seconds = time.perf_counter() - begin
    return {"tok/s": sum(tokens) / seconds, "ttft": percentiles(firsts)}


async def loads(llm: Any, watch: Watch, clients: int) -> dict[str, Any]:
    results: dict[str, Any] = {"first": {}, "second": {}, "rested": {}}
    for name, result in results.items():
        if name == "rested":
            await asyncio.sleep(REST_SECONDS)
        with counted(llm, watch, result):
            result |= await load(llm, watch, clients)
    return results


def row_counts(llm: Any, watch: Watch, max_rows: int) -> dict[str, Any]:
    """As many prompts at once as there are rows, as a library gets them."""
    from minfer import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=TOKENS_OUT, ignore_eos=True)
    results = dict[str, Any]()
    for rows in (rows for rows in ROWS if rows <= max_rows):
        results[f"{rows} rows"] = {"first": {}, "second": {}}
        for result in results[f"{rows} rows"].values():
            with counted(llm, watch, result):
                prompts, begin = watch.prompts(rows), time.perf_counter()
                llm.generate(prompts, params)
                seconds = time.perf_counter() - begin
            result["tok/s"] = rows * TOKENS_OUT / seconds
    return results


@contextmanager
def counted(llm: Any, watch: Watch, result: dict[str, Any]) -> Iterator[None]:
    """Add to a result what the steps of a load did that was not prepared."""
    executor = cast("TorchExecutor", llm.worker.driver.executor)
    before, compiled = executor.counts(), len(watch.compiled)
    yield
    for name, count in executor.counts().items():
        if count > before[name]:
            result[name] = count - before[name]
    result["compiled"] = len(watch.compiled) - compiled
    result["graphs_after"] = len(executor.runner.captures.graphs)


def part(job: dict[str, Any]) -> dict[str, Any]:
    """Open, serve, and return what was found."""
    from minfer import LLM, AsyncLLM

    words = range(1, qwen(job["shape"])["vocab_size"])
    watch, clients = Watch(job["began"], random.Random(SEED), words), job["clients"]
    llm = watch.opened(AsyncLLM if clients else LLM, job)
    ready = {"ready_seconds": watch.now(), "compiled_before_ready": len(watch.compiled)}
    watch.lines.clear()
    if clients:
        results = asyncio.run(loads(llm, watch, clients))
    else:
        results = row_counts(llm, watch, job["rows"])
    llm.close()
    return {**ready, "stages": watch.stages, "loads": results, "lines": watch.lines}


# --- all of them ------------------------------------------------------------------------


def write_model(folder: Path, shape: str) -> Path:
    """A config, and a tokenizer whose words are numbers."""
    from tokenizers import Tokenizer, models

    folder.mkdir()
    config = qwen(shape)
    (folder / "config.json").write_text(json.dumps(config))
    words = {f"{i:x}": i for i in range(config["vocab_size"])}
    Tokenizer(models.WordLevel(words, "0")).save(str(folder / "tokenizer.json"))
    return folder


def child(job: dict[str, Any], cache: Path) -> dict[str, Any]:
    """What a part's process found. Raises RuntimeError with its last words."""
    job = {**job, "began": time.time()}
    env = {**os.environ, CHILD: json.dumps(job), "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "bench.first_minute"]
    try:
        process = subprocess.run(
            command,
            env=env,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(
            f"no end after {LIMIT_SECONDS:.0f} s: {error.stderr!r}"
        ) from error
    if process.returncode:
        raise RuntimeError(f"{process.stdout[-1000:]}\n{process.stderr[-6000:]}")
    result: dict[str, Any] = json.loads(process.stdout.strip().splitlines()[-1])
    return result


def verdict(result: dict[str, Any]) -> dict[str, Any]:
    """The figures that targets are about."""
    by_load, start = result["loads"], {"ready s": result["ready_seconds"]}
    start["compiled"] = result["compiled_before_ready"]
    if "first" not in by_load:
        shares = {
            rows: uses["first"]["tok/s"] / uses["second"]["tok/s"]
            for rows, uses in by_load.items()
        }
        return {**start, "least first of second": min(shares.values()), **shares}
    first, second = by_load["first"], by_load["second"]
    return {
        **start,
        "first of second": first["tok/s"] / second["tok/s"],
        "first tok/s": first["tok/s"],
        "second tok/s": second["tok/s"],
        "rested tok/s": by_load["rested"]["tok/s"],
        "first TTFT p99 ms": 1000 * first["ttft"]["p99"],
        "second TTFT p99 ms": 1000 * second["ttft"]["p99"],
        "compiled under load": sum(figures["compiled"] for figures in by_load.values()),
    }


def job_of(name: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What the process of a part is told; writes its model, if it is not there."""
    shape, clients = name.split()
    model = folder / shape
    if not model.exists():
        write_model(model, shape)
    return {
        "model": str(model),
        "shape": shape,
        "device": args.device,
        "clients": int(clients),
        "rows": args.rows,
    }


def measure(args: argparse.Namespace) -> None:
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("python -m bench.first_minute needs a CUDA GPU")
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else "none"
    path = args.folder / f"{args.name}.json"
    results: dict[str, Any] = {}
    if path.exists() and not args.again:
        results = json.loads(path.read_text("utf-8"))["results"]["parts"]
    broken = list[str]()
    numbers = [*args.clients, *([0] if args.rows else [])]
    loads = [f"{shape} {number}" for shape in args.shapes for number in numbers]
    with tempfile.TemporaryDirectory() as folder:
        for name, cache in product(loads, CACHES):
            key = f"{name} {cache}"
            # The part with a full cache needs what the part with an empty one leaves.
            if all(f"{name} {each}" in results for each in CACHES):
                continue
            job = job_of(name, args, Path(folder))
            try:
                result = child(job, Path(folder) / f"{name} cache")
            except Exception as error:  # whatever it is, the others go on
                print(f"{key} is broken: {error}", file=sys.stderr, flush=True)
                broken.append(key)
                continue
            figures = {"verdict": verdict(result), **result, "gpu": gpu}
            results[key] = {**circumstances(SEED), **figures}
            write(args.name, {"parts": results}, SEED, args.folder)
            show({f"{key:16}": results[key]["verdict"]})
    if broken:
        raise SystemExit(f"broken: {', '.join(broken)}")


OPTIONS: Final[dict[str, Any]] = {
    "--again": {"action": "store_true", "help": "measure what is there, too"},
    "--shapes": {"nargs": "+", "default": SHAPES},
    "--clients": {"nargs": "*", "type": int, "default": CLIENTS},
    "--rows": {
        "type": int,
        "default": ROWS[-1],
        "help": "most rows at once; 0: none",
    },
    "--device": {"default": "cuda"},
}

if __name__ == "__main__":
    if job := os.environ.get(CHILD):
        print(json.dumps(part(json.loads(job))))
    else:
        run("first_minute", measure, OPTIONS)

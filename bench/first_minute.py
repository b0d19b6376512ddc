"""The first minute of a server: from its start until it is ready, and its first load
beside the second.

    python -m bench.first_minute [--again]

Needs a CUDA GPU. Each part is a process of its own, which opens an `AsyncLLM` with the
shape of Qwen2.5 0.5B and random weights, and serves 8 or 64 clients, each with one
request after the other (512 tokens in, 128 out): twice in a row, and once more after a
rest, in which graphs are captured that no request waits for. `empty`: on a machine
without compiled kernels. `full`: the same again. Targets: the first load has 0.85 of the
second's throughput; ready within 30 s without compiled kernels, within 10 s with them,
and then none is compiled.

Parts that the result file has are not measured again, unless `--again`. All of them take
two minutes.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from attrs import define, field

from bench.results import ROOT, circumstances, percentiles, run, show, write
from bench.shapes import SHAPES, qwen

MODEL: Final = "0.5B"
CLIENTS: Final = (8, 64)
REQUESTS_PER_CLIENT: Final = 8  # requests of a client, one after the other
TOKENS_IN: Final = 512
TOKENS_OUT: Final = 128
REST_SECONDS: Final = 4.0  # seconds before the last load
SEED: Final = 0
CACHES: Final = ("empty", "full")
LIMIT_SECONDS: Final = 100.0  # seconds of a part
CHILD: Final = "MINFER_FIRST_MINUTE"  # a part's job, in its process's environment
WORDS: Final = range(1, 100_000)  # token ids of prompts
SETTINGS: Final[dict[str, Any]] = {
    "device": "cuda",
    "load_format": "dummy",
    "max_num_seqs": 256,
    "enable_prefix_caching": False,
}


# --- a part, in its own process ---------------------------------------------------------


@define
class Watch:
    """What a process did when, since it was started."""

    began: float
    stages: dict[str, Any] = field(factory=dict)
    compiled: list[str] = field(factory=list)

    def now(self) -> float:
        return time.time() - self.began

    def report(self, progress: Any) -> None:
        stage = self.stages.setdefault(progress.stage, {"from": self.now()})
        stage |= {"to": self.now(), "done": progress.done, "of": progress.total}

    def listen(self, *, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            self.compiled.append(src.name)


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


async def load(
    llm: Any, rng: random.Random, watch: Watch, clients: int
) -> dict[str, Any]:
    """All clients at once; what they saw, and what the engine had to do for it."""
    captures = llm.worker.driver.executor.runner.captures
    graphs, compiled = len(captures.graphs), len(watch.compiled)
    missed = Counter(captures.launched)
    prompts = [
        [rng.choices(WORDS, k=TOKENS_IN) for _ in range(REQUESTS_PER_CLIENT)]
        for _ in range(clients)
    ]
    firsts = list[float]()
    begin = time.perf_counter()
    tokens = await asyncio.gather(
        *(client(llm, client_prompts, firsts) for client_prompts in prompts)
    )
    seconds = time.perf_counter() - begin
    return {
        "tok/s": sum(tokens) / seconds,
        "ttft": percentiles(firsts),
        "graphs_before": graphs,
        "graphs_after": len(captures.graphs),
        "launched_one_by_one": sum((Counter(captures.launched) - missed).values()),
        "missed": [str(kind) for kind in captures.launched],
        "compiled": len(watch.compiled) - compiled,
    }


async def loads(llm: Any, watch: Watch, clients: int) -> dict[str, Any]:
    rng, results = random.Random(SEED), dict[str, Any]()
    for name in ("first", "second", "rested"):
        if name == "rested":
            await asyncio.sleep(REST_SECONDS)
        results[name] = await load(llm, rng, watch, clients)
    return results


def part(job: dict[str, Any]) -> None:
    """Open, serve, and print what was found."""
    watch = Watch(job["began"])
    from triton import knobs

    from minfer import AsyncLLM
    from minfer.effects.live.engine import open_engine as opening

    knobs.compilation.listener = watch.listen
    plain = opening.open_executor

    def watched(setup: Any, tokenizer: Any, _: Any) -> Any:
        return plain(setup, tokenizer, watch.report)

    with patch.object(opening, "open_executor", watched):
        llm = AsyncLLM(job["model"], **SETTINGS)
    ready, compiled = watch.now(), len(watch.compiled)
    results = asyncio.run(loads(llm, watch, job["clients"]))
    llm.close()
    print(json.dumps({
        "ready_seconds": ready,
        "compiled_before_ready": compiled,
        "stages": watch.stages,
        "loads": results,
    }))  # fmt: skip


# --- all of them ------------------------------------------------------------------------


def write_model(folder: Path) -> Path:
    """A config, and a tokenizer whose words are numbers."""
    from tokenizers import Tokenizer, models

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(qwen(MODEL)))
    words = {f"{i:x}": i for i in range(SHAPES[MODEL][5])}
    Tokenizer(models.WordLevel(words, "0")).save(str(folder / "tokenizer.json"))
    return folder


def child(model: Path, clients: int, cache: Path) -> dict[str, Any]:
    """What a part's process found. Raises RuntimeError with its last words."""
    job = {"model": str(model), "clients": clients, "began": time.time()}
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
    first, second = result["loads"]["first"], result["loads"]["second"]
    return {
        "ready s": result["ready_seconds"],
        "compiled": result["compiled_before_ready"],
        "first of second": first["tok/s"] / second["tok/s"],
        "first tok/s": first["tok/s"],
        "second tok/s": second["tok/s"],
        "rested tok/s": result["loads"]["rested"]["tok/s"],
        "first TTFT p99 ms": 1000 * first["ttft"]["p99"],
        "second TTFT p99 ms": 1000 * second["ttft"]["p99"],
        "compiled under load": sum(
            figures["compiled"] for figures in result["loads"].values()
        ),
    }


def measure(args: argparse.Namespace) -> None:
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("python -m bench.first_minute needs a CUDA GPU")
    path = args.folder / f"{args.name}.json"
    results: dict[str, Any] = {}
    if path.exists() and not args.again:
        results = json.loads(path.read_text("utf-8"))["results"]["parts"]
    broken = list[str]()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / MODEL)
        # With a full cache there is what the part before it has left.
        names = [f"{cache} {n}" for n in CLIENTS for cache in CACHES]
        results = {name: results[name] for name in names if name in results}
        for name in names if len(results) < len(names) else ():
            _, clients = name.split()
            try:
                result = child(model, int(clients), Path(folder) / clients)
            except Exception as error:  # whatever it is, the others go on
                print(f"{name} is broken: {error}", file=sys.stderr, flush=True)
                broken.append(name)
                continue
            gpu = {"gpu": torch.cuda.get_device_name()}
            figures = {"verdict": verdict(result), **result, **gpu}
            results[name] = {**circumstances(SEED), **figures}
            write(args.name, {"parts": results}, SEED, args.folder)
            show({f"{name:8}": results[name]["verdict"]})
    if broken:
        raise SystemExit(f"broken: {', '.join(broken)}")


if __name__ == "__main__":
    if job := os.environ.get(CHILD):
        part(json.loads(job))
    else:
        again = {"action": "store_true", "help": "measure what is there, too"}
        run("first_minute", measure, {"--again": again})

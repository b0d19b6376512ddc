"""The server against its own engine: tokens per second over HTTP and as a library.

One shape with random weights on a GPU, prefix cache off, 512 tokens in, 128 out, closed
loop, streaming, eight client processes; at each number of clients the library does the
same first, in a process of its own: as many requests at once, on the same GPU. Each part
has a file of its own in the folder of results and is not measured again while that is
there, so a run that was cut off goes on where it was.

    python -m bench.server_gpu --shape 0.5B --fronts 1 2 4 --clients 8 64 256
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from bench.clients import LoadPlan, figures_of, put
from bench.results import ROOT, circumstances, run, show
from bench.server_clients import write_model
from bench.shapes import SHAPES, qwen

PROMPT, OUTPUT = 512, 128  # tokens
# Requests of a client in a run, one after the other: few clients ask more often, so that
# the ramps at both ends of a run are little of it.
LEAST, MOST, ALTOGETHER = 12, 48, 1536
PROCESSES = 8  # of clients
TICKS = os.sysconf("SC_CLK_TCK")
ENGINE = [
    "--max-model-len",
    "1024",
    "--no-enable-prefix-caching",
    "--load-format",
    "dummy",
]

LIBRARY = """
import json, random, sys, time
from minfer import LLM, SamplingParams
model, device, clients, each, prompt, output = json.loads(sys.argv[1])
began = time.perf_counter()
llm = LLM(model, device=device, load_format="dummy", max_model_len=1024,
          enable_prefix_caching=False, max_num_seqs=max(clients))
opened = time.perf_counter() - began
found = {}
rng = random.Random(0)
params = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
for at_once in [max(clients), *clients]:  # the first warms up
    llm.worker.driver.config = __import__("attrs").evolve(
        llm.worker.driver.config, max_num_seqs=at_once)
    prompts = [rng.choices(range(1000, 30000), k=prompt) for _ in range(at_once * each)]
    begin = time.perf_counter()
    llm.generate(prompts, params)
    seconds = time.perf_counter() - begin
    found[at_once] = at_once * each * output / seconds
print(json.dumps({"opened_seconds": opened, "output_tokens_per_second": found}))
"""


def requests_each(args: argparse.Namespace, clients: int) -> int:
    """How many requests a client sends in a run."""
    return args.each or max(LEAST, min(MOST, ALTOGETHER // clients))


def library(args: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Tokens per second of the library, in a process of its own for each number."""
    rates: dict[str, Any] = {}
    for clients in args.clients:
        per_client = requests_each(args, clients)
        job = [str(model), args.device, [clients], per_client, args.prompt, args.output]
        process = subprocess.run(
            [sys.executable, "-c", LIBRARY, json.dumps(job)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        result = json.loads(process.stdout.splitlines()[-1])
        rates[str(clients)] = result["output_tokens_per_second"][str(clients)]
        show({"library": clients, "output_tokens_per_second": rates[str(clients)]})
    return rates


@contextmanager
def server(
    args: argparse.Namespace,
    model: Path,
    fronts: int,
    tree: Path = ROOT,
    extra_options: Sequence[str] = (),
) -> Iterator[tuple[str, subprocess.Popen[str], float]]:
    """A server of a tree that is ready, its process, and how long that took in seconds;
    `extra_options` are options of `minfer serve`.
    """
    options = ["--model", str(model), "--device", args.device, *ENGINE, *extra_options]
    with serving([*options, "--api-processes", str(fronts)], tree) as served:
        yield served


@contextmanager
def serving(
    options: Sequence[str], tree: Path = ROOT
) -> Iterator[tuple[str, subprocess.Popen[str], float]]:
    """As `server`, with these options of `minfer serve` and no others."""
    command = [sys.executable, "-m", "minfer", "serve", "--port", "0", *options]
    paths = f"{tree}:{os.environ.get('PYTHONPATH', '')}"
    begin = time.perf_counter()
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tree,
        env={**os.environ, "PYTHONPATH": paths},
    ) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                raise RuntimeError("the server did not start")
            url = line.split()[-1].removesuffix("/v1")
            yield url, process, time.perf_counter() - begin
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def cpu_seconds(parent: int) -> dict[int, float]:
    """Processor time of a process's children so far."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text("ascii").split()
    seconds = {}
    for child in children:
        fields = Path(f"/proc/{child}/stat").read_text("ascii").rpartition(")")[2].split()
        seconds[int(child)] = (int(fields[11]) + int(fields[12])) / TICKS
    return seconds


def is_engine(process: int) -> bool:
    """Whether a process is the engine's, by its name."""
    return Path(f"/proc/{process}/comm").read_text("ascii").strip() == "minfer engine"


def load(
    args: argparse.Namespace,
    url: str,
    clients: int,
    seed: int,
    vocab_size: int | None = None,
    processes: int = PROCESSES,
) -> dict[str, float]:
    """What the clients see of one run; prompts have ids below `vocab_size`, which is the
    shape's if it is not given.
    """
    plan = LoadPlan(
        url=url,
        prompt_tokens=args.prompt,
        output_tokens=args.output,
        vocab_size=vocab_size or qwen(args.shape)["vocab_size"],
        count=clients * requests_each(args, clients),
        clients=clients,
        seed=str(seed),
    )
    return figures_of(put(plan, processes))


def served(args: argparse.Namespace, model: Path, fronts: int) -> dict[str, Any]:
    """All numbers of clients, twice: the first run meets kernels and graphs that are not
    there yet.
    """
    runs: dict[str, Any] = {}
    with server(args, model, fronts) as (url, process, ready):
        seed = 0
        for number in ("first", "second"):
            for clients in args.clients:
                seed += 1
                before = cpu_seconds(process.pid)
                figures = load(args, url, clients, seed)
                after = cpu_seconds(process.pid)
                tokens = figures["total_output_tokens"]
                spent = {p: after[p] - before.get(p, 0.0) for p in after}
                of_fronts = [s for p, s in spent.items() if not is_engine(p)]
                result = {
                    "figures": figures,
                    "front_cpu_us_per_token": 1e6 * sum(of_fronts) / tokens,
                    "busiest_front": max(of_fronts, default=0) / figures["duration"],
                    "engine_cpu_us_per_token": 1e6
                    * (sum(spent.values()) - sum(of_fronts))
                    / tokens,
                }
                runs.setdefault(str(clients), {})[number] = result
                show(line(fronts, clients, number, result))
    return {"ready_seconds": ready, "clients": runs}


def line(
    fronts: int, clients: int, number: str, result: dict[str, Any]
) -> dict[str, Any]:
    """What is shown of a run."""
    figures = result["figures"]
    return {
        "fronts": fronts,
        "clients": clients,
        "run": number,
        "tok_s": round(figures["output_throughput"]),
        "ttft_p99_ms": figures["p99_ttft_ms"],
        "itl_p99_ms": figures["p99_itl_ms"],
        "front_us": round(result["front_cpu_us_per_token"], 1),
        "busiest": round(result["busiest_front"], 2),
        "engine_us": round(result["engine_cpu_us_per_token"], 1),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    parts_folder = args.folder / f"{args.name}_{args.shape}"
    parts_folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        write_model(model, qwen(args.shape))
        work: dict[str, Callable[[], dict[str, Any]]] = {}
        if not args.no_library:
            work["library"] = partial(library, args, model)
        for fronts in args.fronts:
            work[f"fronts {fronts}"] = partial(served, args, model, fronts)
        for name, do in work.items():
            path = parts_folder / f"{name.replace(' ', '_')}.json"
            if not path.exists():
                result = {"circumstances": circumstances(None), "found": do()}
                path.write_text(json.dumps(result, indent=1), "utf-8")
            results[name] = json.loads(path.read_text("utf-8"))["found"]
    return {"shape": args.shape, "prompt": args.prompt, "output": args.output, **results}


if __name__ == "__main__":
    numbers = {"type": int, "nargs": "+"}
    run(
        "server_gpu",
        measure,
        {
            "--shape": {"choices": tuple(SHAPES), "default": "0.5B"},
            "--device": "cuda",
            "--clients": {**numbers, "default": [8, 64, 256]},
            "--fronts": {**numbers, "default": [1, 2, 4]},
            "--each": {"type": int, "default": 0, "help": "requests of a client"},
            "--prompt": PROMPT,
            "--output": OUTPUT,
            "--no-library": {"action": "store_true"},
        },
    )

"""First tokens against the time between tokens, by `--itl-target`, of real servers.

    python -m bench.itl_targets_gpu
    python -m bench.itl_targets_gpu --vllm "python3 -m vllm.entrypoints.openai.api_server"
    python -m bench.itl_targets_gpu --shape tiny --device cpu --targets auto none \
        --clients 2 --each 2 --rate 4 --requests 8

One server after the other, each with a 7B of random weights and no prefix cache, gets
512 tokens in and 128 out, streamed: closed loops of 8, 64 and 256 clients that begin
together, after one of 8 that does not count, and a Poisson process at half the rate that
8 clients reach. `--vllm` is a command that starts vLLM's server, in an environment of its
own.

Each server has a file of its own in the folder of results and is not measured again while
that is there, so a run that was cut off goes on where it was, and prints the whole table
at its end.
"""

import argparse
import json
import os
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx

from bench.clients import LoadPlan, due_times, figures_of, put
from bench.results import circumstances, run, show
from bench.server_clients import write_model
from bench.server_gpu import ENGINE, PROCESSES, requests_each, serving
from bench.shapes import SHAPES, TINY, qwen

PROMPT, OUTPUT = 512, 128  # tokens
VLLM: Final = "vllm"
VLLM_SECONDS: Final = 400.0  # until it is ready
SETTLE_SECONDS: Final = 5.0  # in which an idle engine captures graphs
TOKENIZER: Final = {"tokenizer_class": "PreTrainedTokenizerFast"}
SHOWN: Final = {
    "tok/s": "output_throughput",
    "TTFT p50": "median_ttft_ms",
    "TTFT p99": "p99_ttft_ms",
    "ITL p50": "median_itl_ms",
    "ITL p99": "p99_itl_ms",
    "longest": "most_itl_ms",
}


@contextmanager
def vllm(command: str, model: Path) -> Iterator[str]:
    """vLLM's server, when it is ready; its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--model", str(model), "--port", str(port), "--load-format", "dummy"]
    options += ["--max-model-len", "1024", "--no-enable-prefix-caching"]
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1"}
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        [*shlex.split(command), *options], env=environment, start_new_session=True
    )
    try:
        for _ in range(int(VLLM_SECONDS)):
            if process.poll() is not None:
                raise RuntimeError(f"vLLM ended with {process.returncode}")
            try:
                if httpx.get(f"{url}/health").is_success:
                    break
            except httpx.TransportError:
                pass
            time.sleep(1)
        else:
            raise RuntimeError(f"vLLM was not ready after {VLLM_SECONDS:.0f} s")
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


@contextmanager
def started(args: argparse.Namespace, name: str, model: Path) -> Iterator[str]:
    """The server of that name; its address."""
    if name == VLLM:
        with vllm(args.vllm, model) as url:
            yield url
        return
    options = ["--model", str(model), "--device", args.device, *ENGINE]
    with serving([*options, "--itl-target", name]) as (url, _, _):
        yield url


def loaded(args: argparse.Namespace, url: str, clients: int, seed: str) -> dict[str, Any]:
    """A closed loop; or, without clients, a Poisson process."""
    rate = 0 if clients else args.rate
    count = clients * requests_each(args, clients) if clients else args.requests
    plan = LoadPlan(
        url=url,
        prompt_tokens=args.prompt,
        output_tokens=args.output,
        vocab_size=qwen(args.shape)["vocab_size"],
        count=count,
        clients=clients or count,
        due=due_times(count, rate) if rate else (),
        seed=seed,
    )
    requests = put(plan, PROCESSES)
    longest = max(gap for request in requests for gap in request.itl)
    return {**figures_of(requests), "most_itl_ms": longest}


def measured(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """All loads of one server."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        write_model(model, qwen(args.shape))
        (model / "tokenizer_config.json").write_text(json.dumps(TOKENIZER))
        with started(args, name, model) as url:
            loaded(args, url, min(args.clients), "warm")
            time.sleep(SETTLE_SECONDS)
            for clients in args.clients:
                load = f"{clients} clients"
                results[load] = loaded(args, url, clients, load)
                show({"server": name, "load": load, **brief(results[load])})
            load = f"{args.rate:g} a second"
            results[load] = loaded(args, url, 0, load)
            show({"server": name, "load": load, **brief(results[load])})
    return results


def brief(figures: dict[str, Any]) -> dict[str, Any]:
    """What is shown of a load."""
    return {title: round(figures[key], 1) for title, key in SHOWN.items()}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All servers that are not there yet; returns those that are there."""
    folder = args.folder / args.name
    folder.mkdir(parents=True, exist_ok=True)
    servers, results = [*args.targets, *([VLLM] if args.vllm else [])], {}
    for name in servers:
        path = folder / f"{name}.json"
        if not path.exists():
            result = {**circumstances(None), "found": measured(args, name)}
            path.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    for path in sorted(folder.glob("*.json")):
        results[path.stem] = json.loads(path.read_text("utf-8"))["found"]
    for name, loads in results.items():
        for load, figures in loads.items():
            show({"server": name, "load": load, **brief(figures)})
    names = ("shape", "prompt", "output", "each", "rate", "requests")
    return {**{name: getattr(args, name) for name in names}, "servers": results}


if __name__ == "__main__":
    run(
        "itl_targets_gpu",
        measure,
        {
            "--shape": {"choices": [*SHAPES, *TINY], "default": "7B"},
            "--device": {"choices": ["cuda", "cpu"], "default": "cuda"},
            "--targets": {"nargs": "+", "default": ["auto", "none", "6", "8", "12"]},
            "--vllm": {"default": "", "help": "a command that starts vLLM's server"},
            "--clients": {"type": int, "nargs": "+", "default": [8, 64, 256]},
            "--each": {"type": int, "default": 0, "help": "requests of a client"},
            "--rate": {"type": float, "default": 5.7, "help": "requests a second"},
            "--requests": {"type": int, "default": 120, "help": "at that rate"},
            "--prompt": PROMPT,
            "--output": OUTPUT,
        },
    )

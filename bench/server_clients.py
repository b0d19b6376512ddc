"""Throughput of the server at 1, 2, 4 and 8 clients that stream, as the clients see it.

A process, `minfer serve`, with the 0.5B shape (Qwen2.5's, random weights) and a tokenizer
that has a text for each token, so that each token is an event. Clients send one request
after the other, each with a prompt of its own. The numbers of clients take turns, so that
a slow minute hits all.
"""

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench.results import canvas, percentiles, run, show, spread
from bench.shapes import qwen

CLIENTS = (1, 2, 4, 8)
PROMPT, OUTPUT = 32, 32  # tokens
MODEL = qwen("0.5B")
VOCABULARY = int(MODEL["vocab_size"])
BODY = {
    "max_tokens": OUTPUT,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}
Cell = defaultdict[
    str, list[float]
]  # what was measured at one number of clients, over all repeats


def write_model(folder: Path) -> None:
    """The shape's configuration and a tokenizer for it; the weights are the server's."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(f"{i:x}Ġ" for i in range(len(alphabet), VOCABULARY))]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))


def request(client: httpx.Client, prompt: list[int], cell: Cell) -> int:
    """Stream one completion; returns its output tokens."""
    times, tokens = [time.perf_counter()], 0
    with client.stream(
        "POST", "/v1/completions", json={"prompt": prompt, **BODY}
    ) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
                usage = json.loads(line[6:])["usage"]
                tokens = usage["completion_tokens"] if usage else 0
    gaps = [
        later - sooner for sooner, later in itertools.pairwise(times[:-1])
    ]  # less the usage's
    cell["ttft_seconds"].append(gaps[0])
    cell["itl_seconds"] += gaps[1:]
    return tokens


def repeat(url: str, clients: int, requests: int, cell: Cell, rng: random.Random) -> None:
    """So many clients at once, each with so many requests in a row."""
    prompts = [
        rng.choices(range(VOCABULARY), k=PROMPT) for _ in range(clients * requests)
    ]

    def one(i: int) -> int:
        with httpx.Client(base_url=url, timeout=300) as client:
            return sum(request(client, prompt, cell) for prompt in prompts[i::clients])

    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        tokens = sum(pool.map(one, range(clients)))
    cell["output_tokens_per_second"].append(tokens / (time.perf_counter() - began))


def figures(cell: Cell) -> dict[str, Any]:
    rate = spread(cell["output_tokens_per_second"])
    latencies = {
        name: percentiles(cell[name]) for name in ("ttft_seconds", "itl_seconds")
    }
    requests = len(cell["ttft_seconds"])
    return {"output_tokens_per_second": rate, **latencies, "requests": requests}


def plot(found: list[dict[str, Any]], path: Path) -> None:
    """Throughput with its spread, and the two latencies, over the number of clients."""
    figure = canvas(8, 3.2)
    left, right = figure.subplots(1, 2)
    rates = [one["output_tokens_per_second"] for one in found]
    bars = [
        [abs(rate["median"] - rate[end]) for rate in rates] for end in ("low", "high")
    ]
    left.errorbar(
        CLIENTS, [rate["median"] for rate in rates], bars, marker="o", capsize=3
    )
    left.set(xlabel="clients", ylabel="output tokens/s", xticks=CLIENTS, ylim=(0, None))
    for name, mark in (("ttft", "o"), ("itl", "s")):
        for share in ("p50", "p99"):
            values = [one[f"{name}_seconds"][share] for one in found]
            right.plot(CLIENTS, values, f"{mark}-", label=f"{name.upper()} {share}")
    right.set(xlabel="clients", ylabel="seconds", xticks=CLIENTS, ylim=(0, None))
    right.legend()
    figure.savefig(path, metadata={"Date": None})


def measure(args: argparse.Namespace) -> dict[str, Any]:
    rng, cells = random.Random(args.seed), {clients: Cell(list) for clients in CLIENTS}
    with tempfile.TemporaryDirectory() as path:
        write_model(Path(path))
        command = [
            sys.executable,
            "-m",
            "minfer",
            "serve",
            "--port=0",
            f"--model={path}",
            "--load-format=dummy",
            "--max-model-len=1024",
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            try:
                url = server.stdout.readline().split()[-1].removesuffix("/v1")
                repeat(url, 1, 1, Cell(list), rng)  # warms up
                for _ in range(args.repeats):
                    for clients, cell in cells.items():
                        repeat(url, clients, args.requests, cell, rng)
                        show({"clients": clients, **figures(cell)})
            finally:
                server.terminate()
    found = {str(clients): figures(cell) for clients, cell in cells.items()}
    args.folder.mkdir(parents=True, exist_ok=True)
    plot([*found.values()], args.folder / "server_clients.svg")
    return {"prompt_tokens": PROMPT, "output_tokens": OUTPUT, "clients": found}


if __name__ == "__main__":
    requests = {"type": int, "default": 2, "help": "of each client in a repeat"}
    run("server_clients", measure, {"--repeats": 5, "--requests": requests, "--seed": 0})

"""Throughput of the server at 1, 2, 4 and 8 clients that stream, as the clients see it.

A process, `minfer serve`, with the 0.5B shape (Qwen2.5's, random weights) and a tokenizer
that has a text for each token, so that each token is an event. Clients send one request
after the other, each with a prompt of its own. The numbers of clients take turns, so that
a slow minute hits all.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench.clients import MS, LoadPlan, figures_of, put
from bench.results import canvas, percentiles, run, show, spread
from bench.shapes import qwen

CLIENTS = (1, 2, 4, 8)
PROMPT, OUTPUT = 32, 32  # tokens
MODEL = qwen("0.5B")
VOCABULARY = int(MODEL["vocab_size"])
Cell = defaultdict[
    str, list[float]
]  # what was measured at one number of clients, over all repeats


def write_model(folder: Path, model: dict[str, Any] = MODEL) -> None:
    """The shape's configuration and a tokenizer for it; the weights are the server's."""
    (folder / "config.json").write_text(json.dumps(model))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = range(len(alphabet), int(model["vocab_size"]))
    words = [*alphabet, *(f"{i:x}Ġ" for i in ids)]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def repeat(url: str, clients: int, requests: int, cell: Cell, seed: int) -> None:
    """`clients` clients at once, each with `requests` requests in a row."""
    plan = LoadPlan(
        url=url,
        prompt_tokens=PROMPT,
        output_tokens=OUTPUT,
        vocab_size=VOCABULARY,
        count=clients * requests,
        clients=clients,
        seed=str(seed),
    )
    answered = put(plan)
    cell["output_tokens_per_second"].append(figures_of(answered)["output_throughput"])
    cell["ttft_seconds"] += [request.ttft / MS for request in answered]
    cell["itl_seconds"] += [gap / MS for request in answered for gap in request.itl]


def figures(cell: Cell) -> dict[str, Any]:
    rate = spread(cell["output_tokens_per_second"])
    latencies = {
        name: percentiles(cell[name]) for name in ("ttft_seconds", "itl_seconds")
    }
    requests = len(cell["ttft_seconds"])
    return {"output_tokens_per_second": rate, **latencies, "requests": requests}


def plot(cells: list[dict[str, Any]], path: Path) -> None:
    """Throughput with its spread, and the two latencies, over the number of clients."""
    figure = canvas(8, 3.2)
    left, right = figure.subplots(1, 2)
    rates = [cell["output_tokens_per_second"] for cell in cells]
    bars = [
        [abs(rate["median"] - rate[end]) for rate in rates] for end in ("low", "high")
    ]
    left.errorbar(
        CLIENTS, [rate["median"] for rate in rates], bars, marker="o", capsize=3
    )
    left.set(xlabel="clients", ylabel="output tokens/s", xticks=CLIENTS, ylim=(0, None))
    for name, mark in (("ttft", "o"), ("itl", "s")):
        for share in ("p50", "p99"):
            values = [cell[f"{name}_seconds"][share] for cell in cells]
            right.plot(CLIENTS, values, f"{mark}-", label=f"{name.upper()} {share}")
    right.set(xlabel="clients", ylabel="seconds", xticks=CLIENTS, ylim=(0, None))
    right.legend()
    figure.savefig(path, metadata={"Date": None})


def measure(args: argparse.Namespace) -> dict[str, Any]:
    seeds = itertools.count(args.seed)  # another for each: no prompt comes twice
    cells = {clients: Cell(list) for clients in CLIENTS}
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
                repeat(url, 1, 1, Cell(list), next(seeds))  # warms up
                for _ in range(args.repeats):
                    for clients, cell in cells.items():
                        repeat(url, clients, args.requests, cell, next(seeds))
                        show({"clients": clients, **figures(cell)})
            finally:
                server.terminate()
    results = {str(clients): figures(cell) for clients, cell in cells.items()}
    args.folder.mkdir(parents=True, exist_ok=True)
    plot([*results.values()], args.folder / "server_clients.svg")
    return {"prompt_tokens": PROMPT, "output_tokens": OUTPUT, "clients": results}


if __name__ == "__main__":
    requests = {"type": int, "default": 2, "help": "of each client in a repeat"}
    run("server_clients", measure, {"--repeats": 5, "--requests": requests, "--seed": 0})

"""`minfer serve` of this tree and of another on one GPU, interleaved: how many times as
fast is this one over HTTP?

    python -m bench.server_pairs --before TREE --shape 0.5B --clients 64 256

Both servers are up at once, with KV caches of the same size, and get the same loads in
turn, from eight client processes of this tree (512 tokens in, 128 out, closed loop,
streamed, no prefix cache). What counts is the ratio of each pair. The first loads meet
graphs that are not captured yet: they do not count, but the first of a number of clients
is reported as `first`. Before them the servers rest: idle engines capture graphs, which
would slow the other one down.

    python -m bench.server_pairs --before TREE --dry-run --name server_pairs_dry

The same without a model: plausible text at once, so that what is measured is HTTP and
what lies between it and the engine.
"""

import argparse
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.results import ROOT, run, show, spread
from bench.server_clients import write_model
from bench.server_gpu import OUTPUT, PROCESSES, PROMPT, load, server, serving
from bench.shapes import SHAPES, TINY, qwen

WARM: Final = 1  # loads of each server that do not count
DRY: Final = ("--dry-run", "--no-enable-prefix-caching", "--max-num-seqs", "256")
DRY_VOCAB_SIZE: Final = 2_000  # the bundled tokenizer has more
CACHE: Final = 10 << 30  # bytes of KV cache of each engine: 256 requests of a 7B


def paired(args: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Both servers under all numbers of clients."""
    results: dict[str, Any] = {}
    options = ("--kv-cache-memory-bytes", str(args.cache))
    vocab_size = DRY_VOCAB_SIZE if args.dry_run else None
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                serving([*DRY, "--api-processes", str(args.fronts)], tree)
                if args.dry_run
                else server(args, model, args.fronts, tree, options)
            )
            for tree in (args.before.resolve(), ROOT)
        ]
        results["ready seconds"] = [ready for _, _, ready in servers]
        time.sleep(args.rest)
        for clients in args.clients:
            runs: list[list[float]] = []
            for number in range(WARM + args.pairs):
                rates = [0.0, 0.0]
                for index in (0, 1) if number % 2 else (1, 0):
                    url, seed = servers[index][0], clients * 100 + number
                    result = load(args, url, clients, seed, vocab_size, args.processes)
                    rates[index] = result["output_throughput"]
                runs.append(rates)
            counted = runs[WARM:]
            results[f"{clients} clients"] = {
                "before": median(earlier for earlier, _ in counted),
                "now": median(now for _, now in counted),
                "times as fast": spread([now / earlier for earlier, now in counted]),
                "first": runs[0],
            }
            show(
                {"shape": args.shape, "clients": clients, **results[f"{clients} clients"]}
            )
    return results


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), qwen(args.shape))
        return {"shape": args.shape, "fronts": args.fronts} | paired(args, Path(folder))


if __name__ == "__main__":
    number = {"type": int}
    run(
        "server_pairs",
        measure,
        {
            "--before": {"type": Path, "required": True, "help": "another tree"},
            "--shape": {"choices": (*SHAPES, *TINY), "default": "0.5B"},
            "--device": "cuda",
            "--clients": {**number, "nargs": "+", "default": [64, 256]},
            "--fronts": {**number, "default": 4},
            "--pairs": {**number, "default": 5},
            "--rest": {**number, "default": 50, "help": "seconds before the first load"},
            "--each": {**number, "default": 0, "help": "requests of a client"},
            "--cache": {**number, "default": CACHE},
            "--dry-run": {"action": "store_true", "help": "servers without a model"},
            "--processes": {**number, "default": PROCESSES, "help": "of clients"},
            "--prompt": PROMPT,
            "--output": OUTPUT,
        },
    )

"""What drawing tokens takes with this tree's kernels and with another's, interleaved:
`python -m bench.sampling_pairs --before TREE`.

Two processes have the same logits, of the vocabulary of Qwen2.5, and draw from them in
CUDA graphs, as a decode step does for rows that are greedy, or have a temperature. They
are asked in turn, so that the machine's noise hits both alike; what counts is the ratio
of each pair. Kernels are asked through `minfer.kernels.sample.sample`, whose arguments
are told apart by name: older trees have fewer.
"""

import argparse
import inspect
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parents[1]
LINES: Final = 4  # batches of logits, in turn
DRAWS: Final = 20  # in a graph
REPLAYS: Final = 25  # of which the median counts
WARM: Final = 2  # pairs that do not count
TEMPERATURES: Final = {"greedy": 0.0, "temperature": 0.8}
SPREAD: Final = 4.5  # of logits: as peaked as a model's


# --- a worker: the kernels of one tree --------------------------------------------------


def serve(device: str, vocab: int) -> None:
    """Answer with microseconds of a draw for some rows at a temperature."""
    import torch

    torch.manual_seed(0)
    print(json.dumps("ready"), flush=True)
    drawing: dict[tuple[int, float], Callable[[], float]] = {}
    for line in sys.stdin:
        rows, temperature = json.loads(line)
        case = rows, temperature
        if case not in drawing:
            drawing[case] = timed(rows, temperature, vocab, device)
        print(json.dumps(drawing[case]()), flush=True)


def timed(rows: int, temperature: float, vocab: int, device: str) -> Callable[[], float]:
    """Microseconds of a draw, each time it is called."""
    import torch

    from minfer.kernels.sample import sample

    ints = torch.arange(rows, dtype=torch.int32, device=device)
    ones = torch.ones(rows, device=device)
    values: dict[str, Any] = {
        "who": ints,  # of older trees
        "rows": ints,
        "temperature": temperature * ones,
        "top_k": 0 * ints,
        "top_p": ones,
        "deepest": torch.inf * ones,
        "typical_p": ones,
        "streams": 1_000_003 * ints.long(),
        "positions": 0 * ints + 640,
        "filtered": False,
    }
    parameters = inspect.signature(sample).parameters
    if "values" in parameters:  # older trees take each by itself
        from minfer.kernels.sample_reference import SamplingValues

        columns = SamplingValues._fields
        values["values"] = SamplingValues(*(values[name] for name in columns))
    arguments: dict[str, Any] = {
        name: value for name, value in values.items() if name in parameters
    }
    lines = [
        (SPREAD * torch.randn(rows, vocab, device=device)).bfloat16()
        for _ in range(LINES)
    ]

    def draws() -> None:
        for i in range(DRAWS):
            sample(lines[i % LINES], **arguments)

    return in_a_graph(draws) if device == "cuda" else by_the_clock(draws)


def in_a_graph(draws: Callable[[], None]) -> Callable[[], float]:
    """By events of the GPU."""
    import torch

    draws()  # compiles kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        draws()

    def once() -> float:
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types here
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # likewise
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        took: float = begin.elapsed_time(end)
        return 1e3 * took / DRAWS

    return lambda: median(once() for _ in range(REPLAYS))


def by_the_clock(draws: Callable[[], None]) -> Callable[[], float]:
    """On the CPU, to try this script."""

    def once() -> float:
        began = time.perf_counter()
        draws()
        return 1e6 * (time.perf_counter() - began) / DRAWS

    return once


# --- the comparison ---------------------------------------------------------------------


@contextmanager
def worker(tree: Path, device: str, vocab: int) -> Iterator[subprocess.Popen[str]]:
    """A process with the kernels of `tree`."""
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), "--serve", device, str(vocab)],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": f"{tree}:{os.environ.get('PYTHONPATH', '')}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        read_answer(process)
        yield process
        if process.stdin is not None:
            process.stdin.close()


def read_answer(process: subprocess.Popen[str]) -> Any:
    """The next answer of a worker. Raises RuntimeError if it has ended."""
    line = process.stdout.readline() if process.stdout is not None else ""
    if not line:
        raise RuntimeError("a worker has ended; see its messages above")
    return json.loads(line)


def ask(process: subprocess.Popen[str], rows: int, temperature: float) -> float:
    """Microseconds of a draw by a worker."""
    if process.stdin is None:
        raise RuntimeError("a worker without a pipe")
    process.stdin.write(json.dumps([rows, temperature]) + "\n")
    process.stdin.flush()
    return float(read_answer(process))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All cases, with both trees in turn."""
    from bench.results import show, spread

    results: dict[str, Any] = {}
    with ExitStack() as stack:
        trees = (args.before.resolve(), HERE)
        workers = [
            stack.enter_context(worker(tree, args.device, args.vocab)) for tree in trees
        ]
        for rows in args.rows:
            for name, temperature in TEMPERATURES.items():
                runs: list[list[float]] = []
                for number in range(WARM + args.pairs):
                    order = workers[
                        :: 1 if number % 2 else -1
                    ]  # neither is always second
                    us = {process: ask(process, rows, temperature) for process in order}
                    runs.append([us[process] for process in workers])
                counted = runs[WARM:]
                old, new = (median(column) for column in zip(*counted, strict=True))
                ratios = spread([earlier / now for earlier, now in counted])
                label = f"{rows} rows: {name}"
                results[label] = {
                    "before, us": old,
                    "now, us": new,
                    "times as fast": ratios,
                }
                show({"case": label, **results[label]})
    return {"device": args.device, "vocabulary": args.vocab, "cases": results}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], int(sys.argv[3]))
    else:
        from bench.results import run

        run(
            "sampling_pairs",
            measure,
            {
                "--before": {"type": Path, "required": True, "help": "another tree"},
                "--rows": {"type": int, "nargs": "+", "default": (1, 256)},
                "--pairs": 40,
                "--vocab": 151_936,
                "--device": {"default": "cuda", "help": "cpu: to try it"},
            },
        )

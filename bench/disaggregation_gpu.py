"""Prefill and decode on engines of their own, beside replicas that do both, on two GPUs.

    python -m bench.disaggregation_gpu
    python -m bench.disaggregation_gpu --servers disaggregated --rates 0.5 1
    python -m bench.disaggregation_gpu --shape bundled --device cpu --prompt 600

`minfer serve --prefill 1 --decode 1` and `minfer serve --replicas 2` (chunked prefill)
get the same open-loop loads, one after the other: Poisson arrivals, prompts of random
tokens that share nothing, and outputs of a fixed length, streamed to one client process.
A request is good if its first token comes within `--ttft` ms and the others take `--tpot`
ms each on average.

`idle` are single requests in ms, each sent when the one before has ended. Where prefill
and decode are apart, the first token comes from the prefill engine, and the second one
when the decode engine has the KV: `first_token` is the wait and the prefill,
`second_token` the transfer and one decode step, `token` a decode step, and `transfer` the
difference.

Each part has a file of its own in the folder of results and is not measured again while
that is there, so a run that was cut off goes on where it was, and parts can be measured
by several calls.
"""

import argparse
import json
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx

from bench.clients import LoadPlan, RequestTimes, due_times, figures_of, put
from bench.results import circumstances, run, show, spread
from bench.server_clients import write_model
from bench.server_gpu import serving
from bench.shapes import SHAPES, TINY, qwen

BUNDLED: Final = "bundled"
SERVERS: Final = {
    "disaggregated": ("--prefill", "1", "--decode", "1"),
    "replicas": ("--replicas", "2"),
}
SETTLE_SECONDS: Final = 25.0  # seconds in which idle GPU engines capture graphs
WARM: Final = 4  # requests at once, before and after that
SHORT_OUTPUT_TOKENS: Final = 32  # output tokens of these, and of single requests
REPORT_SECONDS: Final = 1.0  # seconds until engines have reported their last counts
COUNTER: Final = re.compile(r"^minfer_(kv_\w+|routed)_total\{(.*)\} (\S+)$", re.MULTILINE)
WHERE: Final = re.compile(r'(?:replica|why)="(.*?)"')  # of a request that was routed
SHOWN_FIGURES: Final = (
    "median_ttft_ms",
    "p99_ttft_ms",
    "median_itl_ms",
    "p99_itl_ms",
    "median_tpot_ms",
    "output_throughput",
    "goodput",
)


class Bench:
    """The loads on one server."""

    def __init__(self, url: str, args: argparse.Namespace) -> None:
        self.url, self.args = url, args

    def load(
        self,
        seed: str,
        count: int,
        output: int,
        clients: int | None = None,
        due: Sequence[float] = (),
    ) -> list[RequestTimes]:
        """Send `count` requests, whose prompts follow from the seed; at once, if there
        are neither clients nor due times.
        """
        shape = self.args.shape
        plan = LoadPlan(
            url=self.url,
            prompt_tokens=self.args.prompt,
            output_tokens=output,
            vocab_size=2000 if shape == BUNDLED else qwen(shape)["vocab_size"],
            count=count,
            clients=clients or count,
            due=due,
            seed=seed,
        )
        return put(plan)

    def counts(self) -> dict[str, float]:
        """The counters of KV blocks, and of where requests were sent, so far."""
        time.sleep(REPORT_SECONDS)
        text = httpx.get(f"{self.url}/metrics").text
        counters = dict[str, float]()
        for name, labels, value in COUNTER.findall(text):
            route = WHERE.findall(labels) if name == "routed" else []
            key = " ".join((name, *route))
            counters[key] = counters.get(key, 0.0) + float(value)
        return counters

    def warm_up(self) -> None:
        """Meet kernels and graphs that are not there yet."""
        self.load("warm", WARM, SHORT_OUTPUT_TOKENS)
        if self.args.device == "cuda":
            time.sleep(SETTLE_SECONDS)
            self.load("warm again", WARM, SHORT_OUTPUT_TOKENS)


def changes(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """The counters that have changed, by how much; and GB/s of what was sent and got."""
    differences = {name: value - before.get(name, 0.0) for name, value in after.items()}
    for way, work in (("sent", "send"), ("received", "receive")):
        if seconds := differences.get(f"kv_{work}_seconds"):
            differences[f"{way} GB/s"] = differences[f"kv_{way}_bytes"] / seconds / 1e9
    return {name: value for name, value in sorted(differences.items()) if value}


def idle(bench: Bench) -> dict[str, Any]:
    """Single requests, in parts. The first is not counted."""
    before = bench.counts()
    requests = bench.load("idle", bench.args.idle + 1, SHORT_OUTPUT_TOKENS, clients=1)[1:]
    counts = changes(before, bench.counts())
    timings = [parts_of(request) for request in requests]
    spreads = {name: spread([timing[name] for timing in timings]) for name in timings[0]}
    return {**spreads, "counts": counts}


def parts_of(request: RequestTimes) -> dict[str, float]:
    """Times of a request in ms."""
    second, *later = request.itl
    token = median(later)
    return {
        "first_token": request.ttft,
        "second_token": second,
        "token": token,
        "transfer": second - token,
    }


def loaded(bench: Bench, rate: float) -> dict[str, Any]:
    """Requests at a rate, per second."""
    args = bench.args
    count = max(2, round(rate * args.seconds))
    before = bench.counts()
    due = due_times(count, rate, seed=args.seed)
    requests = bench.load(f"rate {rate}", count, args.output, due=due)
    goals = {"ttft": args.ttft, "tpot": args.tpot}
    return {
        "requests": count,
        **figures_of(requests),
        "goodput": sum(request.meets(goals) for request in requests) / count,
        "counts": changes(before, bench.counts()),
    }


def options_of(args: argparse.Namespace, name: str, folder: Path) -> list[str]:
    """The options of a server."""
    max_length = args.prompt + max(SHORT_OUTPUT_TOKENS, args.output)
    options = [
        *SERVERS[name],
        "--device",
        args.device,
        "--max-model-len",
        str(max_length),
    ]
    if args.shape != BUNDLED:
        write_model(folder, qwen(args.shape))
        options += ["--model", str(folder), "--load-format", "dummy"]
    return options


def measure_server(
    args: argparse.Namespace, name: str, measurements: dict[Path, Callable[[Bench], Any]]
) -> None:
    """Measure parts on one server, and write each when it is there."""
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(options_of(args, name, Path(folder))) as (url, _, ready),
    ):
        bench = Bench(url, args)
        bench.warm_up()
        for path, work in measurements.items():
            figures = work(bench)
            result = {
                **circumstances(args.seed),
                "ready_seconds": ready,
                "found": figures,
            }
            path.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
            show({"server": name, "part": path.stem, **brief(figures)})


def brief(figures: dict[str, Any]) -> dict[str, Any]:
    """What is shown of a part."""
    if "goodput" not in figures:
        return figures
    return {name: figures[name] for name in SHOWN_FIGURES}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All parts of all servers that are not there yet; returns those that are there."""
    folder = args.folder / args.name
    folder.mkdir(parents=True, exist_ok=True)
    for name in args.servers:
        works: dict[str, Callable[[Bench], Any]] = {f"{name}_idle": idle}
        works |= {f"{name}_{rate:g}": partial(loaded, rate=rate) for rate in args.rates}
        measurements = {
            folder / f"{part_name}.json": work for part_name, work in works.items()
        }
        if left := {
            path: work for path, work in measurements.items() if not path.exists()
        }:
            measure_server(args, name, left)
    paths = sorted(folder.glob("*.json"))
    results = {path.stem: json.loads(path.read_text("utf-8"))["found"] for path in paths}
    settings = ("shape", "prompt", "output", "seconds", "ttft", "tpot")
    return {**{name: getattr(args, name) for name in settings}, "parts": results}


def names(text: str) -> Sequence[str]:
    """Servers, with commas between them."""
    servers = text.split(",")
    if not set(servers) <= set(SERVERS):
        raise argparse.ArgumentTypeError(f"servers are {', '.join(SERVERS)}")
    return servers


if __name__ == "__main__":
    run(
        "disaggregation_gpu",
        measure,
        {
            "--shape": {"choices": [*SHAPES, *TINY, BUNDLED], "default": "7B"},
            "--device": {"choices": ["cuda", "cpu"], "default": "cuda"},
            "--servers": {"type": names, "default": [*SERVERS]},
            "--rates": {"type": float, "nargs": "+", "default": [0.5, 1.0, 1.5, 2.0]},
            "--seconds": {"type": float, "default": 40.0, "help": "of each rate"},
            "--prompt": 8192,
            "--output": 256,
            "--idle": {"type": int, "default": 8, "help": "single requests"},
            "--ttft": {"type": float, "default": 2000.0, "help": "ms; of a good request"},
            "--tpot": {"type": float, "default": 30.0, "help": "ms; of a good request"},
            "--seed": 0,
        },
    )

"""Which layout of 16 machines of 8 GPUs serves Mooncake's conversation trace at the
highest rate with a first token within 2 s and 50 ms for each other: replicas of one, two
or four ranks, prefill apart from decode, with host memory or without.

All is simulated: the engine and the router are the real ones, on a virtual clock, and
what steps and copies cost was measured on H100s (`costs`, of which each part names its
result file; `assumed` says what was not measured). Each machine gets a sixteenth of the
requests, as the trace's first `--requests`, `speed` times as fast as recorded, behind a
router of its own; `machines` 16 is one router over all 128 GPUs, and the trace 16 times
as fast. The first quarter of the requests counts in no latency.

The highest rate at which a percentile of requests keeps both limits is found by
bisection, to about 5 %. `checks`: the same costs beside two measured H100s under a load
of `bench.disaggregation_gpu`; the winner over another length of the trace, and with one
router over all machines.
"""

import argparse
import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy
from attrs import define, evolve, frozen

from bench.clients import due_times
from bench.layout_costs import DENSE, GPUS, Layout, assumed, measured
from bench.layout_runs import (
    MACHINES,
    TPOT,
    TTFT,
    Outcome,
    TooSlowError,
    figures,
    simulation,
)
from bench.results import run, show
from bench.routing import TRACE
from minfer.effects.runs.arrivals import ArrivalTrace, TraceRow
from minfer.effects.runs.trace_files import read_trace

RATE_RATIO: Final = 1.1  # between rates until one keeps the limits, and one does not
MAX_RATE_RATIO: Final = 1.05  # a bisection ends when the rates are so close


@frozen
class Search:
    """The highest rate of a layout is sought, from a speed on."""

    layout: Layout
    percentile: int = 90
    start: float = 4.5


def highest(trace: ArrivalTrace, search: Search) -> dict[str, Any]:
    """The fastest trace with which a percentile keeps the limits, and the slowest that
    was tried with which it does not; none, if that is a quarter of the first one.
    """
    best: dict[str, Any] | None = None
    low, high, speed, runs = 0.0, 0.0, search.start, 0
    name = f"p{search.percentile}"
    while not low or not high or high / low > MAX_RATE_RATIO:
        runs += 1
        try:
            result = figures(search.layout, trace, speed, percentile=search.percentile)
            keeps_limits = result["ttft"][name] <= TTFT and result["tpot"][name] <= TPOT
        except TooSlowError:
            keeps_limits = False
        if keeps_limits:
            low, best = speed, result
        else:
            high = speed
        if not low and high < search.start / 4:
            break
        if low and high:
            speed = (low * high) ** 0.5
        else:
            speed = high / RATE_RATIO if high else low * RATE_RATIO
    return {
        "layout": search.layout.name,
        "percentile": search.percentile,
        "keeps": best,
        "fails_at_speed": high,
        "runs": runs,
    }


# --- the layouts ------------------------------------------------------------------------


ONE: Final = Layout("8 x TP 1", budget=4096)
TWO: Final = Layout("4 x TP 2", 2, budget=4096)
FOUR: Final = Layout("2 x TP 4", 4, budget=4096)
APART: Final = tuple(
    Layout(f"TP 1, {count} prefill and {GPUS - count} decode", prefill=count)
    for count in (5, 6)
)
HOST: Final = evolve(ONE, name="8 x TP 1, host memory", host=True)
HASHED: Final = evolve(
    HOST, name="8 x TP 1, host memory, prefix_hash", routing="prefix_hash"
)
SEARCHES: Final = (
    Search(ONE),
    Search(TWO, start=4.4),
    Search(FOUR, start=3.6),
    *map(Search, APART, (90, 90), (2.8, 4.0)),
    Search(HASHED, start=4.2),
    Search(HOST),
    Search(evolve(ONE, name="8 x TP 1, round_robin", routing="round_robin"), start=3.8),
    Search(Layout("TP 2, 3 prefill and 1 decode", 2, prefill=3), start=3.8),
    *(
        Search(Layout(name, 2, budget=4096, experts=mode), start=3.2)
        for name, mode in (
            ("experts divided, 4 x 2 ranks", "divided"),
            ("whole experts, 4 x 2 ranks", "whole"),
        )
    ),
    Search(FOUR, 99, 2.0),
)


# --- checks -----------------------------------------------------------------------------


def beside_measured() -> list[dict[str, Any]]:
    """Two GPUs under prompts of 8,192 tokens: what was measured, with HTTP, and what is
    predicted for requests at the same times; medians.
    """
    measurements, outcome = measured("disaggregation_gpu"), list[dict[str, Any]]()
    layouts = {
        "replicas": Layout("", budget=8192),
        "disaggregated": Layout("", prefill=GPUS // 2),
    }
    for (name, layout), rate in product(layouts.items(), (1, 2, 3)):
        real = measurements["parts"][f"{name}_{rate}"]
        due = due_times(real["requests"], float(rate))
        rows = [
            TraceRow(time, measurements["prompt"], measurements["output"], (number,))
            for number, time in enumerate(due)
        ]
        simulated = simulation(layout, ArrivalTrace(tuple(rows)), 1.0, 2)
        requests = [*Outcome().see(simulated.run()).served.values()]
        predicted = {
            "ttft": float(numpy.median([request.ttft for request in requests])),
            "tpot": float(numpy.median([request.tpot for request in requests])),
        }
        actual = {figure: real[f"median_{figure}_ms"] / 1e3 for figure in predicted}
        outcome.append(
            {
                "layout": name,
                "requests/s": rate,
                "predicted": predicted,
                "measured": actual,
                "ratio": {
                    figure: predicted[figure] / actual[figure] for figure in predicted
                },
            }
        )
        show(outcome[-1])
    return outcome


def one_router(trace: ArrivalTrace, search: Search) -> dict[str, Any]:
    """All machines behind one router, at nearly the rate found."""
    speed = 0.95 * MACHINES * search.start
    return figures(search.layout, trace, speed, MACHINES)


@define
class Kept:
    """Work whose outcome is kept in a folder: a call that is repeated goes on where the
    last one ended.
    """

    work: Callable[[Search], dict[str, Any]]
    folder: Path

    def __call__(self, search: Search) -> dict[str, Any]:
        path = self.folder / f"{search.layout.name}, p{search.percentile}.json"
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.work(search), indent=1) + "\n", "utf-8")
        result: dict[str, Any] = json.loads(path.read_text("utf-8"))
        return result


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Search the layouts, and check the best one whose prefill is not apart, and the best
    one whose prefill is: over twice as many requests of the trace; and, of four times as
    many, behind one router.
    """
    folder = args.folder / args.name
    trace, twice, longer = (
        read_trace(str(args.trace), args.requests * times) for times in (1, 2, 4)
    )
    with ProcessPoolExecutor(args.workers) as pool:
        results = [*pool.map(Kept(partial(highest, trace), folder / "found"), SEARCHES)]
        best = list[Search]()
        for apart in (False, True):
            rates = [
                Search(search.layout, start=result["keeps"]["speed"])
                for result, search in zip(results, SEARCHES, strict=True)
                if bool(search.layout.prefill) == apart
                and search.percentile == 90
                and search.layout.shape == DENSE
                and result["keeps"]
            ]
            best.append(max(rates, key=lambda search: search.start))
        router_checks = pool.map(
            Kept(partial(one_router, longer), folder / "router"), best
        )
        long = pool.map(Kept(partial(highest, twice), folder / "twice"), best)
        checks = {"one router": [*router_checks], "twice as many requests": [*long]}
    return {
        "machines": MACHINES,
        "gpus": GPUS,
        "requests": args.requests,
        "limits": {"ttft": TTFT, "tpot": TPOT},
        "costs": assumed(),
        "beside_measured": beside_measured(),
        "layouts": results,
        "checks": checks,
    }


if __name__ == "__main__":
    run(
        "layouts",
        measure,
        {
            "--trace": TRACE,
            "--requests": {"type": int, "default": 1200, "help": "of the trace"},
            "--workers": {"type": int, "default": 2, "help": "processes"},
        },
    )

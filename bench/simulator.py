"""The simulator beside reality: throughput and latencies, predicted and measured.

The bundled model on the CPU, or with `--shape 7B` random weights of Qwen2.5's shapes on
the GPU, serves synthetic traces, one after the other and again, so that the machine's
noise hits all. In each round, what steps cost is fitted to two of them, and the others
are predicted from their arrivals alone. `error` is of the medians of all rounds. The
clock leaves out time in which the engine was ready to run and other processes had its
core.
"""

import argparse
import asyncio
import contextlib
import tempfile
import threading
import time
from collections import deque
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from bench.results import run, show, spread
from minfer.effects.runs.arrivals import ArrivalTrace
from minfer.effects.runs.costs import MeasuredStep, fit, measured_steps
from minfer.effects.runs.report import Report
from minfer.effects.runs.trace_files import read_trace
from minfer.records.config import EngineConfig
from minfer.records.request import Request
from minfer.records.state import EngineState, Turn
from minfer.simulation.cost import CostModel
from minfer.simulation.simulate import Simulated, Simulation

CPU = {
    "fitted": ("rate=10,requests=60,prompt=300,output=60,spread=0.8,seed=1"),
    "fitted too": ("rate=1000,requests=60,prompt=80,output=60,spread=0.8,seed=5"),
    "twice the rate, shorter": (
        "rate=20,requests=140,prompt=120,output=50,spread=0.8,seed=2"
    ),
    "longer, some alike": (
        "rate=7,requests=50,prompt=400,output=80,spread=0.4,shared=0.5,seed=3"
    ),
    "all at once": ("rate=1000,requests=90,prompt=150,output=60,spread=0.6,seed=4"),
}
GPU = {
    "fitted": ("rate=16,requests=160,prompt=1200,output=100,spread=0.9,seed=1"),
    "fitted too": ("rate=1000,requests=200,prompt=300,output=100,spread=0.5,seed=5"),
    "twice the rate, shorter": (
        "rate=50,requests=300,prompt=300,output=80,spread=0.5,seed=2"
    ),
    "longer, some alike": (
        "rate=10,requests=60,prompt=2000,output=120,spread=0.4,shared=0.5,seed=3"
    ),
    "all at once": ("rate=1000,requests=300,prompt=512,output=80,spread=0.5,seed=4"),
}
Runs = dict[str, list[dict[str, float]]]


class Clock:
    """Seconds but for those in which the engine's thread was ready and others had its
    core.
    """

    def __init__(self) -> None:
        self.thread, self.waited, self.before = (
            0,
            0.0,
            0.0,
        )  # of this thread, of those before

    def __call__(self) -> float:
        if threading.current_thread().name == "minfer-engine":
            if self.thread != threading.get_native_id():
                self.before, self.waited = self.before + self.waited, 0.0
            self.thread = threading.get_native_id()
        with contextlib.suppress(
            OSError
        ):  # no such thread any more, or not on this system
            stat = Path(f"/proc/self/task/{self.thread}/schedstat").read_text("ascii")
            self.waited = int(stat.split()[1]) / 1e9
        return time.monotonic() - self.before - self.waited


class Kept(list[Turn]):
    """A recorder that keeps turns."""

    __call__ = list.append

    def close(self, state: EngineState) -> None:
        pass


def serve(
    llm: Any, trace: ArrivalTrace, salt: str
) -> tuple[list[MeasuredStep], dict[str, float]]:
    """Serve a trace in real time; `salt` keeps its prefixes apart from those of other
    runs.
    """
    from minfer import SamplingParams

    driver, turns, report = llm.worker.driver, Kept(), Report(llm.setup.config)
    driver.record, begin = turns, driver.clock() + 0.1

    async def serve_request(arrival: float, request: Request) -> None:
        params = SamplingParams(
            temperature=0, max_tokens=request.max_tokens, ignore_eos=True
        )
        ids = [10 + token % 2000 for token in request.prompt]
        prompt = {"prompt_token_ids": ids, "cache_salt": salt}
        while (left := begin + arrival - driver.clock()) > 0:
            await asyncio.sleep(left)
        report.note_arrival(request.id, driver.clock())
        async for _ in llm.generate_deltas(
            prompt, params, streaming=False, request_id=request.id
        ):
            pass

    async def serve_all() -> None:
        arrivals = (
            (arrival, event)
            for arrival, event in trace.arrivals(64)
            if isinstance(event, Request)
        )
        await asyncio.gather(
            *(serve_request(arrival, request) for arrival, request in arrivals)
        )

    asyncio.run(serve_all())
    driver.record = None
    return [*measured_steps(report.fold_turns(turns))], latencies(report)


def simulated(
    trace: ArrivalTrace, config: EngineConfig, cost: CostModel
) -> dict[str, float]:
    report = Report(config)
    arrivals = report.note_arrivals(trace.arrivals(config.block_size))
    deque(
        report.fold_turns(Simulation(config, Simulated(), cost, arrivals).turns()),
        maxlen=0,
    )
    return latencies(report)


def latencies(report: Report) -> dict[str, float]:
    figures = report.figures()
    result = {"tokens_per_second": figures["tokens_per_second"]}
    return result | {
        f"{n}_{p}": figures[n][p] for n, p in product(("ttft", "tpot"), ("p50", "p99"))
    }


def engine(shape: str, folder: Path) -> Any:
    from minfer import AsyncLLM

    if shape:
        from bench.gpu_workloads import Lab

        return AsyncLLM(
            Lab(folder).model(shape),
            load_format="dummy",
            device="cuda",
            skip_tokenizer_init=True,
            max_num_seqs=256,
        )
    import torch

    torch.set_num_threads(1)
    return AsyncLLM(
        device="cpu",
        dtype="float32",
        skip_tokenizer_init=True,
        max_num_seqs=32,
        num_gpu_blocks_override=2048,
        max_num_batched_tokens=512,
    )


def live(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        llm = engine(args.shape, Path(folder))
    llm.worker.driver.clock = Clock()
    works = (GPU if args.shape else CPU).items()
    traces = {name: read_trace(f"poisson:{parameters}") for name, parameters in works}
    for number, (name, trace) in product(
        range(2), traces.items()
    ):  # the second time with graphs
        serve(llm, trace, f"warm {number} {name}")
    predicted, measured, off = Runs(), Runs(), []
    for number in range(args.rounds):
        paid: list[MeasuredStep] = []
        for name, trace in traces.items():
            steps, figures = serve(llm, trace, f"{number} {name}")
            measured.setdefault(name, []).append(figures)
            paid += steps if name.startswith("fitted") else ()
        cost, errors = fit(paid, args.shape or "the bundled model on the CPU")
        off.append(errors["held_out_error"])
        for name, trace in traces.items():
            predicted.setdefault(name, []).append(
                simulated(trace, llm.setup.config, cost)
            )
    llm.close()
    held_out = {
        kind: spread([fit_error[kind] for fit_error in off]) for kind in ("total", "step")
    }
    results: dict[str, Any] = {"held_out_error": held_out}
    for name, figure in product(traces, predicted["fitted"][0]):
        predictions, real = (
            [run_figures[figure] for run_figures in runs[name]]
            for runs in (predicted, measured)
        )
        pair = {
            "predicted": spread(predictions),
            "measured": spread(real),
            "error": median(predictions) / median(real) - 1,
        }
        results.setdefault(name, {})[figure] = pair
        show({f"{name}: {figure}": pair})
    return results


if __name__ == "__main__":
    run("simulator", live, {"--rounds": 5, "--shape": ""})

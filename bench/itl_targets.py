"""First tokens against the time between tokens, by `--itl-target`, in the simulator.

    python -m bench.itl_targets

512 tokens in, 128 out, of a 7B on an H200: 8 clients that begin together, each asking
again when it is answered; requests that arrive as a Poisson process at half the rate that
these reach; and 64 and 256 clients, for the throughput that a target costs. Beside the
targets: no target with steps of at most 8,192 tokens, which takes all prompts that have
come into one step, as vLLM does by default.

What a step costs is a model, in two variants. `linear` is the one that comes with minfer:
each prefill token costs the same. `products` adds what a step's matrix products take with
as many inputs in all, by cuBLAS in a graph: up to 128 they cost little more than one.
`bench.itl_targets_gpu` measures what a GPU does.
"""

import argparse
import itertools
import random
from bisect import insort
from operator import itemgetter
from typing import Any, Final

import numpy
from attrs import frozen

from bench.clients import due_times
from bench.results import percentiles, run, show
from minfer.effects.runs.costs import H200
from minfer.records.config import EngineConfig
from minfer.records.messages import Emit
from minfer.records.plan import Plan
from minfer.records.request import Request
from minfer.simulation.cost import CostModel, work_of
from minfer.simulation.simulate import ArrivalQueue, Simulated, Simulation

PROMPT, OUTPUT = 512, 128  # tokens
STREAMING_TOKENS: Final = 1536  # of a step of `minfer serve` with a 7B, at most
ALL_AT_ONCE_TOKENS: Final = 8192
HALF: Final = 5.7  # requests a second: half of what 8 clients get answered
POISSON: Final = f"poisson {HALF}/s"
# Clients, and requests of each; of arrivals as a Poisson process, requests in all.
LOADS: Final = {"8 clients": (8, 48), "64 clients": (64, 12), "256 clients": (256, 6)}
POISSON_REQUESTS: Final = 400
SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "all at once": {"max_num_batched_tokens": ALL_AT_ONCE_TOKENS},
    "none": {},
    "40 ms": {"itl_target": 0.040},
    "20 ms": {"itl_target": 0.020},
    "12 ms": {"itl_target": 0.012},
    "8 ms": {"itl_target": 0.008},
    "6 ms": {"itl_target": 0.006},
    "auto": {"itl_target": 0.0},
}
# Milliseconds of the matrix products of a step, by the number of its inputs, on an H200.
PRODUCTS: Final = {
    1: 3.85,
    8: 3.92,
    32: 3.97,
    64: 4.05,
    128: 4.19,
    256: 5.63,
    512: 10.6,
    8192: 165.0,
}
OTHER_KERNELS: Final = 0.6e-3  # seconds of a step besides its products
MS: Final = 1000.0
START_SPREAD: Final = 0.003  # seconds within which the first requests come
RETURN_SECONDS: Final = 0.003  # from an answer to the client's next request, on average


@frozen(kw_only=True)
class ProductCosts(CostModel):
    """Costs by the matrix products of all inputs of a step, from `PRODUCTS`."""

    def seconds(self, plan: Plan) -> float:
        work = work_of(plan)
        inputs = work.prefill_tokens + work.decode_rows
        products = float(numpy.interp(inputs, [*PRODUCTS], [*PRODUCTS.values()])) / MS
        return products + OTHER_KERNELS + self.context * work.read_positions


COSTS: Final[dict[str, CostModel]] = {
    "linear": H200,
    "products": ProductCosts(
        name="products by cuBLAS",
        decode=H200.decode,
        mixed=0.0,
        token=0.0,
        context=H200.context,
    ),
}


class Clients:
    """Requests, and when their tokens came."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.arrivals = ArrivalQueue()
        self.sent = dict[str, float]()
        self.times = dict[str, list[float]]()

    def ask(self, time: float) -> None:
        """Send one more request at `time`; its prompt shares no prefix with others."""
        name = str(len(self.sent))
        prompt = tuple(self.rng.choices(range(30_000), k=PROMPT))
        self.sent[name] = time
        self.times[name] = []
        request = Request(id=name, prompt=prompt, max_tokens=OUTPUT)
        insort(self.arrivals, (time, request), key=itemgetter(0))

    def run(self, config: EngineConfig, cost: CostModel, repeated: int) -> None:
        """Take turns until all is answered; clients ask again until there have been
        `repeated` requests.
        """
        for turn in Simulation(config, Simulated(), cost, self.arrivals).turns():
            now = turn.transition.state.time
            for command in turn.transition.commands:
                if not isinstance(command, Emit):
                    continue
                for (name, _), tokens in zip(command.ids, command.tokens, strict=True):
                    self.times[name] += [now] * len(tokens)
                for _ in command.finished[: max(0, repeated - len(self.sent))]:
                    self.ask(now + self.rng.uniform(0.5, 1.5) * RETURN_SECONDS)

    def figures(self) -> dict[str, Any]:
        """Throughput, and latencies in milliseconds."""
        times = self.times.values()
        ttft = [MS * (times[0] - self.sent[name]) for name, times in self.times.items()]
        itl = [MS * (b - a) for row in times for a, b in itertools.pairwise(row)]
        seconds = max(row[-1] for row in times)
        return {
            "tok_s": sum(map(len, times)) / seconds,
            "ttft_ms": percentiles(ttft),
            "itl_ms": {**percentiles(itl), "most": max(itl)},
        }


def simulated(
    setting: dict[str, Any], cost: CostModel, load: str, seed: int
) -> dict[str, Any]:
    """The figures of one load."""
    sizes = {"num_blocks": 8000, "max_model_len": 1024}
    budget = {"max_num_batched_tokens": STREAMING_TOKENS}
    config = EngineConfig(**{**sizes, **budget, **setting})
    clients = Clients(seed)
    if load == POISSON:
        for time in due_times(POISSON_REQUESTS, HALF, seed):
            clients.ask(time)
        clients.run(config, cost, 0)
        return clients.figures()
    count, each = LOADS[load]
    for time in sorted(clients.rng.uniform(0, START_SPREAD) for _ in range(count)):
        clients.ask(time)
    clients.run(config, cost, count * each)
    return clients.figures()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All settings under all loads."""
    results: dict[str, Any] = {}
    for cost, load in itertools.product(COSTS, (*LOADS, POISSON)):
        rows = results.setdefault(cost, {}).setdefault(load, {})
        for name, setting in SETTINGS.items():
            rows[name] = figures = simulated(setting, COSTS[cost], load, args.seed)
            show({"costs": cost, "load": load, "target": name, **brief(figures)})
    return results


def brief(figures: dict[str, Any]) -> dict[str, Any]:
    """What is shown of a run."""
    return {
        "tok_s": round(figures["tok_s"]),
        "ttft_p50_ms": round(figures["ttft_ms"]["p50"], 1),
        "itl_p99_ms": round(figures["itl_ms"]["p99"], 2),
        "itl_most_ms": round(figures["itl_ms"]["most"], 1),
    }


if __name__ == "__main__":
    run("itl_targets", measure, {"--seed": 0})

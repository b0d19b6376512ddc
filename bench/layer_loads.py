"""The loads of `layers_gpu` and `layers_vllm`: the same of each engine."""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, Final, Protocol

from attrs import frozen

from bench.results import spread

INPUTS, OUTPUTS, LONG, STEPS = 512, 128, 32_000, 64
WARMED_ROWS: Final = 8  # at most, of the request before the first measured one
REPEATS: Final = 3  # of a load
PROMPTS: Final = 5  # whose first token is timed

# Returns the output tokens a second, by rows, and by inputs and outputs of each row.
Ask = Callable[[int, int, int], float]
Figures = dict[str, Any]


class Engine(Protocol):
    """An engine with one model."""

    def ask(self, rows: int, inputs: int, outputs: int) -> float:
        """Returns the output tokens a second of `rows` requests at once."""

    def steps(self, rows: int, context: int) -> Figures:
        """Returns the median time of a step in which `rows` decode: `step_figures`."""


@frozen
class Loads:
    """What an engine is asked for."""

    rows: Sequence[int]  # of requests at once
    long: Sequence[int]  # rows of steps at `context` tokens
    prefill: Sequence[int]  # tokens of a prompt
    inputs: int = INPUTS
    outputs: int = OUTPUTS
    context: int = LONG


def measured(name: str, engine: Engine, loads: Loads) -> dict[str, list[Figures]]:
    """Measure an engine, and print its figures as they come."""
    measures: dict[str, tuple[Callable[[int], Figures], Sequence[int]]] = {
        "throughput": (
            lambda rows: throughput(engine.ask, rows, loads.inputs, loads.outputs),
            loads.rows,
        ),
        "steps": (lambda rows: engine.steps(rows, loads.context), loads.long),
        "prefill": (partial(prefill, engine.ask), loads.prefill),
    }
    results: dict[str, list[Figures]] = {part: [] for part in measures}
    for part, (measure, sizes) in measures.items():
        for size in sizes:
            results[part].append(measure(size))
            print(name, results[part][-1], flush=True)
    return results


def throughput(ask: Ask, rows: int, inputs: int, outputs: int) -> Figures:
    """Returns the output tokens a second of `rows` requests at once."""
    ask(min(rows, WARMED_ROWS), inputs, 2)
    speeds = [ask(rows, inputs, outputs) for _ in range(REPEATS)]
    return {"rows": rows, "tok_s": spread(speeds)}


def prefill(ask: Ask, inputs: int) -> Figures:
    """Returns the time from a prompt to its first token, in milliseconds."""
    ask(1, inputs, 1)
    times = [1e3 / ask(1, inputs, 1) for _ in range(PROMPTS)]
    return {"inputs": inputs, "first_token_ms": spread(times)}


def step_figures(rows: int, context: int, gaps: Sequence[float]) -> Figures:
    """Returns the median of times of steps, which are in seconds, in milliseconds; None
    if there are none, as the cache does not hold the contexts of all rows.
    """
    step_ms = 1e3 * median(gaps) if gaps else None
    return {"rows": rows, "context": context, "step_ms": step_ms}

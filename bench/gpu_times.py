"""Times of a GPU, by its own clock."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Final

import torch

REPLAYS: Final = 20


def events() -> tuple[Any, Any]:
    """Two events of the GPU's clock."""
    make: Any = torch.cuda.Event  # untyped
    return make(enable_timing=True), make(enable_timing=True)


def microseconds(
    calls: Sequence[Callable[[], object]], ready: Callable[[], object] = lambda: None
) -> float:
    """us of a call, of several in a graph. `ready` returns when all ranks may begin."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    ready()
    spans = [events() for _ in range(REPLAYS)]
    for begin, end in spans:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    ms: list[float] = [begin.elapsed_time(end) for begin, end in spans]
    return 1e3 * median(ms) / len(calls)


def call_microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """us of a call; without a GPU, a figure without meaning."""
    if torch.cuda.is_available():
        return microseconds(calls)
    began = time.perf_counter()
    for call in calls:
        call()
    return 1e6 * (time.perf_counter() - began) / len(calls)

"""CUDA graphs of an executor's steps: one for each kind, captured once that is worth its
time.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from attrs import define, field

from minfer.effects.execution.executor import ExecutorError
from minfer.effects.execution.kinds import Kind

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE  # torch's name of it

MOST_KINDS = 256  # graphs, after which only pure decode steps are captured


@define(eq=False)
class GraphCache:
    """The graphs of one executor, which share one pool of memory."""

    device: torch.device
    room: int  # bytes that the largest step takes while it runs
    made: dict[Kind, torch.cuda.CUDAGraph] = field(factory=dict)
    seen: set[Kind] = field(factory=set)  # with inputs from history: ran once at least
    pool: "_POOL_HANDLE | None" = None

    def due(self, kind: Kind) -> bool:
        """Whether a kind without a graph should get one: decode steps come again, others
        may.
        """
        return not kind.tokens or (kind in self.seen and len(self.made) < MOST_KINDS)

    def capture(self, kind: Kind, step: Callable[[Kind], None]) -> torch.cuda.CUDAGraph:
        """Make the graph of a step. It does not run, but what it needs has to be
        compiled.
        """
        # Of this thread: a capture cannot make one.
        torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]  # torch's
        graph = torch.cuda.CUDAGraph()
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        graph.capture_begin(self.pool, "thread_local")
        try:
            if not self.made:
                # All graphs share one segment: a larger one would need its own.
                torch.empty(self.room, dtype=torch.uint8, device=self.device)
            step(kind)
        except BaseException:
            self.pool = None  # it may end with this graph
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
        self.made[kind] = graph
        return graph


@contextlib.contextmanager
def watched(device: torch.device) -> Iterator[None]:
    """Fails if what runs here waits for the device or takes memory, as no graph's step
    should.
    """
    torch.cuda.set_sync_debug_mode("error")
    before = torch.cuda.memory_stats(device)["allocation.all.allocated"]
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    if torch.cuda.memory_stats(device)["allocation.all.allocated"] != before:
        raise ExecutorError("a decode step took memory")

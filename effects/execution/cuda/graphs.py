"""CUDA graphs of an executor's steps: one for each step shape, captured once that is
worth its time.

Theory. A capture takes about as long as launching the step kernel by kernel, 10 to 40 ms,
and all requests of the next step wait for it. So graphs are captured before the first
request, in the order of `capture_order.py`, and while the server is idle (`warm_up.py`).

An engine that is never idle has to capture beside serving. A step whose shape has no
graph is launched kernel by kernel the first time; if it comes again, its graph is
captured and replayed instead, which takes little longer. As in the rent-or-buy problem,
this loses little in the worst case: a shape that never occurs a third time has cost one
capture, about what its launch would have cost. If captures take much longer than launches
on this machine, more launches come first: a step waits for a capture only if launches of
its shape have taken `MIN_SPENT_CAPTURES` times as long as a capture takes, both as
measured here. So captures delay steps by at most 1 / `MIN_SPENT_CAPTURES` times what
launches of the same shapes have. (Deferred draws are a few launches, and their capture is
assumed to take no longer than `DEFERRED_CAPTURE_LAUNCHES` times these.)

Graphs take memory, so their number is bounded (`MAX_GRAPHS`). A graph that was captured
in advance may serve no step, while traffic keeps launching a shape without a graph. So a
new graph that traffic needs replaces another: first those that no step has replayed yet,
from the end of the order of captures, then the one replayed least recently.
"""

import contextlib
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from statistics import median
from typing import TYPE_CHECKING, Final

import torch
from attrs import define, field

from minfer.effects.execution.contract import ExecutorError
from minfer.effects.execution.device.step_shape import StepShape
from minfer.effects.execution.device.streams import CAPTURE_LOCK

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE  # torch's name

MAX_GRAPHS: Final = 384  # graphs; those of pure decode steps may be more
# A step waits for a capture once its shape's launches without a graph have cost as much
# as this number of captures.
MIN_SPENT_CAPTURES: Final = 0.5
# A capture of deferred draws costs at most as much as this number of their launches.
DEFERRED_CAPTURE_LAUNCHES: Final = 2.0
DEFAULT_CAPTURE_SECONDS: Final = 0.05  # until a capture is measured
RECENT_CAPTURES: Final = 9  # captures in the median


@define(eq=False)
class GraphCache:
    """The graphs of one executor, which share one pool of memory."""

    device: torch.device
    room: int  # peak bytes of the largest step
    # By their last replay; before these the graphs without any, the least useful first.
    graphs: OrderedDict[StepShape, torch.cuda.CUDAGraph] = field(factory=OrderedDict)
    launched: Counter[StepShape] = field(factory=Counter)  # launches without a graph
    pool: "_POOL_HANDLE | None" = None
    full: bool = False  # a capture ran out of memory: no step waits for another one
    spent: dict[StepShape, float] = field(factory=dict)  # seconds of these launches
    # Seconds of captures of whole forwards.
    costs: deque[float] = field(
        factory=lambda: deque([DEFAULT_CAPTURE_SECONDS], maxlen=RECENT_CAPTURES)
    )

    def find(self, shape: StepShape) -> torch.cuda.CUDAGraph | None:
        """Returns the graph of a shape that a step is about to replay, if there is
        one.
        """
        graph = self.graphs.get(shape)
        if graph is not None and _is_rare(shape):
            self.graphs.move_to_end(shape)
        return graph

    def may_foresee(self, shape: StepShape) -> bool:
        """Returns whether to capture a shape that no step has needed: if there is room
        for it.
        """
        has_room = len(self.graphs) < MAX_GRAPHS or not _is_rare(shape)
        return has_room and shape not in self.graphs

    def is_due(self, shape: StepShape) -> bool:
        """Returns whether to capture a shape although a step waits for it."""
        if self.full or shape not in self.spent or shape in self.graphs:
            return False
        spent, capture = self.spent[shape], median(self.costs)
        if shape.deferred_draws:
            launch = spent / self.launched[shape]
            capture = min(capture, DEFERRED_CAPTURE_LAUNCHES * launch)
        return spent >= MIN_SPENT_CAPTURES * capture

    def note(self, shape: StepShape, seconds: float) -> None:
        """Note that a step was launched without a graph, which took so long."""
        self.spent[shape] = self.spent.get(shape, 0.0) + seconds
        self.launched[shape] += 1

    def forget(self, shape: StepShape) -> None:
        """Drop a shape from those that are wanted."""
        self.launched.pop(shape, None)
        self.spent.pop(shape, None)

    def wanted(self) -> list[StepShape]:
        """Returns shapes launched without a graph, the most frequent first."""
        return [
            shape for shape, _ in self.launched.most_common() if shape not in self.graphs
        ]

    def add(self, shape: StepShape, graph: torch.cuda.CUDAGraph) -> None:
        """Add a shape's graph; if there are too many, it replaces another."""
        if len(self.graphs) >= MAX_GRAPHS and _is_rare(shape):
            unlikely = next(filter(_is_rare, self.graphs), None)
            if unlikely is not None:
                del self.graphs[unlikely]
        self.graphs[shape] = graph
        if shape not in self.launched:
            self.graphs.move_to_end(shape, last=False)

    def capture(
        self, shape: StepShape, step: Callable[[StepShape], None]
    ) -> torch.cuda.CUDAGraph:
        """Capture a step's graph. The step does not run, but its kernels must be
        compiled.
        """
        with CAPTURE_LOCK:
            return self._capture(shape, step)

    def _capture(
        self, shape: StepShape, step: Callable[[StepShape], None]
    ) -> torch.cuda.CUDAGraph:
        begin = time.monotonic()
        # Create this thread's handle first: a capture cannot create one.
        torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]  # torch's
        graph = torch.cuda.CUDAGraph()
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        graph.capture_begin(self.pool, "thread_local")
        try:
            if not self.graphs:
                # Reserve one segment for all graphs: a larger graph would need its own.
                torch.empty(self.room, dtype=torch.uint8, device=self.device)
            step(shape)
        except BaseException:
            self.pool = None  # the pool may be freed with this graph
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
        self.add(shape, graph)
        if not shape.deferred_draws:
            self.costs.append(time.monotonic() - begin)
        self.forget(shape)
        return graph


def _is_rare(shape: StepShape) -> bool:
    """Returns whether a shape is one of many, few of which will occur."""
    return bool(shape.tokens or shape.drafts)


@contextlib.contextmanager
def watched(device: torch.device) -> Iterator[None]:
    """Raise if the work in this context waits for the device or allocates memory, as
    steps with a graph must not.
    """
    torch.cuda.set_sync_debug_mode("error")
    before = torch.cuda.memory_stats(device)["allocation.all.allocated"]
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    if torch.cuda.memory_stats(device)["allocation.all.allocated"] != before:
        raise ExecutorError("a decode step took memory")

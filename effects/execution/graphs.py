"""CUDA graphs of an executor's steps: one for each kind, captured once that is worth its
time.

Theory. A capture takes about as long as launching the step kernel by kernel, some 10 ms,
and everybody whose step comes next waits for it. So graphs are captured before the first
request, in the order of `capture_order.py`, and while nobody is served (`warm_up.py`);
meanwhile a step without a graph is launched kernel by kernel, which costs a few
milliseconds more each time.

An engine that never rests would lose these for ever. So a step waits for a capture once
that pays: when launching its kind one by one has taken `WORTH` times as long as a capture
takes, both as they were measured here. (Draws that come late are a few launches, and
their capture takes no longer than `PRICE` times these.) Whoever buys what they have paid
that much rent for loses little, whatever comes: a kind that never comes again has cost
one capture more, a fraction of what went before. And engines that rest now and then, as
most do, have their graphs for nothing before that. Two such captures never follow one
another shortly.

Graphs take memory, so their number is bounded (`MOST_KINDS`). A graph that was captured
in advance may serve no step, while traffic keeps launching a kind that has none. So a new
graph that was asked for takes the place of another: of one that no step has replayed yet,
the last in the order of captures first, then of the one replayed least recently.
"""

import contextlib
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from statistics import median
from typing import TYPE_CHECKING, Final

import torch
from attrs import define, field

from minfer.effects.execution.executor import ExecutorError
from minfer.effects.execution.step_shape import StepShape
from minfer.effects.execution.streams import UNDISTURBED

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE  # torch's name of it

MOST_KINDS: Final = 384  # graphs; those of pure decode steps may be more
WORTH: Final = 4.0  # captures that launches must have cost: a rest may come before that
PRICE: Final = 2.0  # steps of late draws, that their capture takes as long as, at most
COST: Final = 0.05  # seconds of a capture, as long as none was measured
RECENT: Final = 9  # captures that are measured by
PAUSE: Final = 0.25  # seconds between two captures that steps wait for


@define(eq=False)
class GraphCache:
    """The graphs of one executor, which share one pool of memory."""

    device: torch.device
    room: int  # bytes that the largest step takes while it runs
    # By their last replay; before these the ones without any, the least useful first.
    made: OrderedDict[StepShape, torch.cuda.CUDAGraph] = field(factory=OrderedDict)
    launched: Counter[StepShape] = field(factory=Counter)  # one by one, how often
    pool: "_POOL_HANDLE | None" = None
    last: float = 0.0  # when one was captured, on the monotonic clock
    spent: dict[StepShape, float] = field(factory=dict)  # seconds of these launches
    # Seconds of captures of whole forwards.
    costs: deque[float] = field(factory=lambda: deque([COST], maxlen=RECENT))

    def find(self, shape: StepShape) -> torch.cuda.CUDAGraph | None:
        """The graph of a kind that a step is about to replay, if there is one."""
        graph = self.made.get(shape)
        if graph is not None and _is_rare(shape):
            self.made.move_to_end(shape)
        return graph

    def may_foresee(self, shape: StepShape) -> bool:
        """Whether a kind that no step has asked for is worth a graph: it takes no
        other's place.
        """
        room = len(self.made) < MOST_KINDS or not _is_rare(shape)
        return room and shape not in self.made

    def due(self, shape: StepShape, now: float) -> bool:
        """Whether a kind is captured although a step waits for it."""
        spent, capture = self.spent.get(shape, 0.0), median(self.costs)
        if shape.late:
            capture = min(capture, PRICE * spent / max(1, self.launched[shape] - 1))
        worth = pays(spent, capture)
        return worth and now - self.last >= PAUSE and shape not in self.made

    def note(self, shape: StepShape, seconds: float) -> None:
        """A step was launched one by one, which took so long."""
        if self.launched[shape]:  # the first may have compiled what it needs
            self.spent[shape] = self.spent.get(shape, 0.0) + seconds
        self.launched[shape] += 1

    def forget(self, shape: StepShape) -> None:
        """No graph of a kind is wanted any more."""
        self.launched.pop(shape, None)
        self.spent.pop(shape, None)

    def wanted(self) -> list[StepShape]:
        """Kinds that steps were launched of one by one, the most frequent first."""
        return [one for one, _ in self.launched.most_common() if one not in self.made]

    def add(self, shape: StepShape, graph: torch.cuda.CUDAGraph) -> None:
        """Keep a graph of a kind; where there are too many, it takes another's place."""
        if len(self.made) >= MOST_KINDS and _is_rare(shape):
            unlikely = next(filter(_is_rare, self.made), None)
            if unlikely is not None:
                del self.made[unlikely]
        self.made[shape] = graph
        if shape not in self.launched:
            self.made.move_to_end(shape, last=False)

    def capture(
        self, shape: StepShape, step: Callable[[StepShape], None]
    ) -> torch.cuda.CUDAGraph:
        """Make the graph of a step. It does not run, but what it needs has to be
        compiled.
        """
        with UNDISTURBED:
            return self._capture(shape, step)

    def _capture(
        self, shape: StepShape, step: Callable[[StepShape], None]
    ) -> torch.cuda.CUDAGraph:
        begin = time.monotonic()
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
            step(shape)
        except BaseException:
            self.pool = None  # it may end with this graph
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
        self.add(shape, graph)
        self.last = time.monotonic()
        if not shape.late:
            self.costs.append(self.last - begin)
        self.forget(shape)
        return graph


def _is_rare(shape: StepShape) -> bool:
    """Whether a kind is one of many of which few will come."""
    return bool(shape.tokens or shape.drafts)


def pays(spent: float, capture: float) -> bool:
    """Whether a step may wait for the capture of its kind, launches of which took `spent`
    seconds.
    """
    return spent > WORTH * capture


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

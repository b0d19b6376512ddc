"""What steps had to do that was not prepared before they came.

Theory. A prepared step replays a graph: that takes the host a fraction of a millisecond,
and allocates nothing. Other work takes milliseconds or seconds, and the first steps of a
shape have to do it: launches kernel by kernel, captures of graphs, compilations of
kernels, and allocations of device memory. This work is counted. Not counted are launches
that no preparation would avoid: of steps that are too large for a graph, or that have
outputs besides tokens. If the executor logs lines of level DEBUG, a line for each step
with any such work names its requests and the work. A prepared step costs nothing here.

Triton's compilations are counted. Those of other packages are part of the time of the
launch that needs them.
"""

import logging
import threading
from collections import Counter, deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import torch
from attrs import define, field, frozen

from minfer.effects.execution.device.step_shape import StepShape
from minfer.effects.execution.device.streams import is_gpu
from minfer.records.plan import NewRow
from minfer.values.texts import counted

if TYPE_CHECKING:  # it imports Triton, which machines without a GPU need not have
    from minfer.kernels.compiling import Compilation

# Names of counts, and of their seconds.
LAUNCHES: Final = "steps_without_graph"
CAPTURES: Final = "graphs_captured_in_steps"
COMPILATIONS: Final = "kernels_compiled_in_steps"
ALLOCATIONS: Final = "device_allocations_in_steps"
ALLOCATED_BYTES: Final = "device_bytes_allocated_in_steps"
SECONDS: Final = "_seconds"  # added to the first three

MISSING: Final = "it has none yet"
TOO_LARGE: Final = "it is too large for one"
EXTRA_OUTPUTS: Final = "it has outputs besides tokens"
MAX_NAMED_REQUESTS: Final = 8  # in a line
MIB: Final = 1 << 20
MS: Final = 1000.0  # milliseconds of a second
_log = logging.getLogger("minfer.executor")


@frozen
class DeviceMemory:
    """What torch's allocator has taken from a device so far."""

    allocations: int = 0
    bytes_held: int = 0

    @classmethod
    def of(cls, device: torch.device) -> "DeviceMemory":
        """Returns what it has taken by now; on the CPU, nothing."""
        if not is_gpu(device):
            return cls()
        stats = torch.cuda.memory_stats(device)
        return cls(stats["num_device_alloc"], stats["reserved_bytes.all.current"])


@define(eq=False)
class UnpreparedWork:
    """The unprepared work of one executor's steps."""

    device: torch.device
    # Those that have ended and are not counted yet, of all threads: some may belong to
    # other work than this executor's steps.
    compilations: "deque[Compilation]" = field(factory=deque)
    counts: Counter[str] = field(factory=Counter)
    seconds: dict[str, float] = field(factory=dict)
    memory: DeviceMemory = DeviceMemory()
    parts: list[str] = field(factory=list)  # of the current step, in words

    @classmethod
    def of(cls, device: torch.device) -> "UnpreparedWork":
        """Returns counts of 0, and begins to watch compilations on a GPU."""
        if not is_gpu(device):
            return cls(device)
        from minfer.kernels.compiling import watch_compilations

        return cls(device, watch_compilations(), memory=DeviceMemory.of(device))

    def restart(self) -> None:
        """Set all counts to 0: what was done so far was preparation."""
        self.compilations.clear()
        self.counts.clear()
        self.seconds.clear()
        self.parts.clear()
        self.memory = DeviceMemory.of(self.device)

    def totals(self) -> dict[str, float]:
        """Returns all counts and seconds by name; from any thread."""
        totals: dict[str, float] = {
            name: self.counts[name]
            for name in (LAUNCHES, CAPTURES, COMPILATIONS, ALLOCATIONS, ALLOCATED_BYTES)
        }
        for name in (LAUNCHES, CAPTURES, COMPILATIONS):
            totals[name + SECONDS] = self.seconds.get(name, 0.0)
        return totals

    def note_launch(self, shape: StepShape, reason: str, seconds: float) -> None:
        """Note that a step was launched without a graph, and why. It is counted if the
        reason is MISSING, and logged in any case.
        """
        if reason == MISSING:
            self._count(LAUNCHES, seconds)
        self.parts.append(
            f"launched without a graph, as {reason}: {shape.described()}, "
            f"{MS * seconds:.1f} ms"
        )
        self._note_memory()

    def note_capture(self, shape: StepShape, seconds: float) -> None:
        """Note that a step waited for the capture of its graph."""
        self._count(CAPTURES, seconds)
        self.parts.append(
            f"captured a graph of {shape.described()}, {MS * seconds:.1f} ms"
        )
        self._note_memory()

    def end_step(self, step: int, owners: Iterable[NewRow | None]) -> None:
        """Log the unprepared work of a step, if it had any."""
        if self.compilations:
            self._note_compilations()
        if not self.parts:
            return
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("step %d of %s: %s", step, _names(owners), "; ".join(self.parts))
        self.parts.clear()

    def _count(self, name: str, seconds: float) -> None:
        self.counts[name] += 1
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def _note_compilations(self) -> None:
        for _ in range(len(self.compilations)):
            compilation = self.compilations.popleft()
            if compilation.thread != threading.get_ident():
                continue  # of another executor, or of work beside steps
            self._count(COMPILATIONS, compilation.seconds)
            self.parts.append(
                f"compiled {compilation.kernel}, {MS * compilation.seconds:.0f} ms"
            )

    def _note_memory(self) -> None:
        before, now = self.memory, DeviceMemory.of(self.device)
        self.memory = now
        if calls := now.allocations - before.allocations:
            taken = max(0, now.bytes_held - before.bytes_held)
            self.counts[ALLOCATIONS] += calls
            self.counts[ALLOCATED_BYTES] += taken
            allocations = counted(calls, "allocation")
            self.parts.append(
                f"took {taken / MIB:.1f} MiB from the device in {allocations}"
            )


def _names(owners: Iterable[NewRow | None]) -> str:
    """Returns the names of the requests of rows, or of the first of many."""
    names = [*dict.fromkeys(owner.name[0] for owner in owners if owner is not None)]
    named = ", ".join(names[:MAX_NAMED_REQUESTS])
    more = len(names) - MAX_NAMED_REQUESTS
    return f"{named} and {more} more" if more > 0 else named

"""The driver's interface to executors."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from minfer.records.messages import (
    AdapterFailed,
    AdapterLoaded,
    Executed,
    Failed,
    LoadAdapter,
    Lost,
    Moved,
    TransferCommand,
)
from minfer.records.plan import NewRow, Plan, SampleDeferred

if TYPE_CHECKING:  # not loaded by code that only plans
    import numpy as np
    from numpy.typing import NDArray

# Called at the end of an adapter's load.
ReportLoad = Callable[[AdapterLoaded | AdapterFailed], None]


class ExecutorError(RuntimeError):
    """A step could not be executed: its result is `Failed`, the engine discards it and
    continues. A `RankError` (`ranks/worker_group.py`) is the exception: an executor's
    methods raise it, and the engine ends.
    """


class LogitsError(ExecutorError):
    """The model's logits for a request are not finite: no token can be sampled."""


class UnsupportedPlanError(ExecutorError):
    """A plan asks for something that this executor cannot do; no part of it was
    executed.
    """


def names_of(owners: Iterable[NewRow | None]) -> str:
    """Returns the names of the requests that rows were opened for, for errors."""
    names = [
        f"{owner.name[0]!r} (sample {owner.name[1]})" if owner else "?"
        for owner in owners
    ]
    return ", ".join(names)


def not_finite(owners: Iterable[NewRow | None]) -> LogitsError:
    """Returns the error that names the requests that these rows were opened for."""
    return LogitsError(
        f"the model's logits are not finite for request {names_of(owners)}"
    )


class Executor(Protocol):
    """Runs plans in order. `minfer.records.plan` states the contract."""

    def launch(self, plan: Plan) -> None:
        """Launch a plan; may return before it has run."""
        ...

    def mask_lines(self, step: int) -> "NDArray[np.int32] | None":
        """Returns memory [lines, words] for the masks of a launched plan, if the executor
        has any: at least a line for each of its deferred rows, of a bit for each token
        id, the lowest first. Called before `sample`, at most once; masks that are written
        there need not be copied.
        """
        ...

    def sample(self, command: SampleDeferred) -> None:
        """Sample the deferred rows of a launched plan, with these masks.

        Called once for each plan with such rows, before it is collected; failed and
        unknown steps are ignored.
        """
        ...

    def move(
        self, command: TransferCommand, report: Callable[[Moved | Lost], None]
    ) -> None:
        """Begin a transfer between the device and a tier; `report` is called at its end,
        from any thread. Called only for engines with that tier.
        """
        ...

    def collect(self) -> Executed | Failed:
        """Wait for the earliest launched plan that was not collected yet, and return its
        results.
        """
        ...

    def close(self) -> None:
        """Release memory and devices; no call may follow."""
        ...


@runtime_checkable
class AdapterExecutor(Protocol):
    """An executor that has adapters, in host memory and in the slots of its device."""

    def add_adapter(self, digest: bytes, folder: str) -> None:
        """Read an adapter into host memory, unless it is there. From any thread; the
        folder is not read later. Raises CheckpointError.
        """
        ...

    def remove_adapter(self, digest: bytes) -> None:
        """Free the host memory of an adapter; what is in a slot stays."""
        ...

    def load_adapter(self, command: LoadAdapter, report: ReportLoad) -> None:
        """Begin to copy an adapter from host memory to a slot; `report` is called at its
        end, from any thread.
        """
        ...


def adapter_executor(executor: Executor) -> AdapterExecutor:
    """Returns an executor as one that has adapters. Raises ExecutorError for another."""
    if not isinstance(executor, AdapterExecutor):
        raise ExecutorError("this executor has no adapters")
    return executor


@runtime_checkable
class CountingExecutor(Protocol):
    """An executor that counts work of its steps, for metrics."""

    def counts(self) -> Mapping[str, float]:
        """Returns counts since it was ready, by the metric's name; from any thread."""
        ...


def counts_of(executor: Executor) -> Mapping[str, float]:
    """Returns the counts of an executor; none if it does not count."""
    return executor.counts() if isinstance(executor, CountingExecutor) else {}


class OtherRanks(Protocol):
    """The other ranks of an engine: `WorkerGroup` (`ranks/worker_group.py`)."""

    on_loss: list[Callable[[], None]]  # called once one of them is lost


@runtime_checkable
class RankedExecutor(Protocol):
    """An executor that may be of one rank of several: on rank 0 it has the workers of
    the others.
    """

    @property
    def workers(self) -> OtherRanks | None:
        """The other ranks; None: there are none, or this is one of them."""
        ...


def workers_of(executor: Executor) -> OtherRanks | None:
    """Returns the other ranks of an executor's engine, if it is rank 0 of several."""
    return executor.workers if isinstance(executor, RankedExecutor) else None

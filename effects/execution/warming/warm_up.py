"""What a GPU's executor does before it is ready, and later when it is idle.

Before: all kernels that traffic can need are compiled in parallel, or found on disk, and
loaded (dummy_steps.py); the largest steps run once, with other packages' kernels, which
compile at first use; graphs are captured for a limited time (capture_order.py). The other
graphs, and those of shapes that were launched without one, are captured while the
executor is idle. None of it is required: failures are logged, and the executor continues
without.
"""

import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from attrs import define, field, frozen

from minfer.effects.execution.device.device_rows import SamplingNeeds
from minfer.effects.execution.device.step_shape import StepShape
from minfer.effects.execution.device.streams import on
from minfer.effects.execution.running.runner import MIN_CONTEXT_TOKENS, ModelRunner
from minfer.effects.execution.warming.capture_order import capture_order
from minfer.effects.execution.warming.dummy_runner import DummyRunner
from minfer.effects.execution.warming.dummy_steps import (
    large_shapes,
    launch_dummy_steps,
)
from minfer.effects.execution.warming.kernel_folder import prepare_kernel_folder
from minfer.effects.execution.warming.start_progress import (
    GRAPHS,
    KERNELS,
    Report,
    StartProgress,
    ignore_progress,
)

CAPTURE_SECONDS: Final = 2.5  # of captures before an executor is ready
DRAFTING_FACTOR: Final = 2.0  # times as long, where there are drafts
DEFAULT_NEEDS: Final = SamplingNeeds(filtered=False, scored=False)
_log = logging.getLogger("minfer.executor")


@frozen
class Readiness:
    """What an executor does before it is ready, and where it reports progress."""

    report: Report = ignore_progress
    likely: SamplingNeeds = DEFAULT_NEEDS  # of requests with default sampling
    capturing: float = CAPTURE_SECONDS  # seconds of captures, at most
    grammars: bool = False  # whether requests may have grammars
    fewer_drafts: bool = False  # whether the number of drafts will vary


@define(eq=False)
class WarmUp:
    """What an executor does before it is ready and while it is idle, in parts."""

    dummy_runner: DummyRunner
    readiness: Readiness
    pending: deque[StepShape] = field(factory=deque)  # to be captured, in order
    stopped: bool = False  # graphs cannot be captured, or do not fit

    @property
    def runner(self) -> ModelRunner:
        """What runs the steps."""
        return self.dummy_runner.runner

    def prepare(self) -> None:
        """Compile all kernels, on each rank by itself."""
        prepare_kernel_folder()
        with self.dummy_runner.on_one_rank():
            self._compile()
            self._large_steps()

    def before_ready(self) -> None:
        """Capture graphs for a limited time, before there is any load."""
        self.pending.extend(self._order())
        # Every decode step has several numbers of drafts.
        drafting = self.runner.config.speculation is not None
        self._capture_for(self.readiness.capturing * (DRAFTING_FACTOR if drafting else 1))
        self.runner.wait()
        _log.info(
            "%d graphs captured before the engine is ready; up to %d more while no "
            "request is served, or when steps need them",
            len(self.runner.captures.graphs),
            len(self.pending),
        )

    def capture_one(self) -> bool:
        """Capture one more graph, the most wanted first; returns whether another
        remains.
        """
        shape = self._next()
        if shape is not None:
            self._capture(shape)
        return not self.stopped and bool(self.pending or self.runner.captures.wanted())

    # --- kernels ------------------------------------------------------------------------

    def _compile(self) -> None:
        """Compile all of Triton's kernels, or find them on disk, and load them."""
        from minfer.kernels.compiling import compile_launches

        self.readiness.report(StartProgress(KERNELS, 0, 0))
        try:
            summary = compile_launches(self._dummy_steps, self._report_kernels)
        except Exception as error:
            # The first step will fail too, if it has no other way.
            _log.warning("kernels are compiled one by one, as they are needed: %r", error)
            return
        _log.info(
            "%d kernels, %d of them compiled, in %.1f s",
            summary.requested,
            summary.compiled,
            summary.seconds,
        )
        if summary.failed:
            _log.warning(
                "%d kernels are left to their first use: %s",
                len(summary.failed),
                summary.failed[0],
            )

    def _dummy_steps(self) -> None:
        """Launch dummy steps, without other packages' kernels, which would run."""
        shortcuts = self.runner.shortcuts
        before = shortcuts.flash, shortcuts.fused
        shortcuts.flash = shortcuts.fused = False
        try:
            with self._step_context():
                launch_dummy_steps(self.dummy_runner)
                self.runner.wait()
        finally:
            shortcuts.flash, shortcuts.fused = before

    def _report_kernels(self, num_done: int) -> None:
        self.readiness.report(StartProgress(KERNELS, num_done, 0))

    def _large_steps(self) -> None:
        """Run the largest steps that have no graph: other packages compile their kernels,
        libraries load theirs, and torch takes the memory that such steps need.
        """
        shortcuts = self.runner.shortcuts
        for shape in large_shapes(self.runner):
            try:
                with self._step_context():
                    shortcuts.begin()
                    self.dummy_runner.dummy_step(shape)
                    self.runner.wait()
            except Exception as error:
                shortcuts.blame(error)
                if not shortcuts.trying:
                    _log.warning("a step of %s failed: %r", shape.described(), error)

    # --- graphs -------------------------------------------------------------------------

    def _order(self) -> list[StepShape]:
        runner, config = self.runner, self.runner.config
        table = runner.rows.blocks * config.block_size
        contexts = sorted(
            {
                min(MIN_CONTEXT_TOKENS << power, table)
                for power in range(table.bit_length())
            }
        )
        return capture_order(
            config,
            runner.captured,
            self.readiness.likely,
            contexts,
            runner.with_context_splits,
            grammars=runner.keeps_logits,
            fewer_drafts=self.readiness.fewer_drafts,
        )

    def _capture_for(self, seconds: float) -> None:
        end, total = time.monotonic() + seconds, len(self.pending)
        while time.monotonic() < end and (shape := self._next()) is not None:
            num_done = total - len(self.pending) - 1
            self.readiness.report(StartProgress(GRAPHS, num_done, total))
            self._capture(shape)

    def _next(self) -> StepShape | None:
        """Returns the shape to capture: one that steps needed, else the next in order."""
        captures = self.runner.captures
        if self.stopped or not self.runner.shortcuts.graphs:
            self.stopped = True
            return None
        if wanted := captures.wanted():
            return wanted[0]
        while self.pending:
            if captures.may_foresee(shape := self.pending.popleft()):
                return shape
        return None

    def _capture(self, shape: StepShape) -> None:
        """Capture a shape; if that fails, disable graphs."""
        shortcuts = self.runner.shortcuts
        shortcuts.begin()
        begin = time.monotonic()
        try:
            with self._step_context():
                self.dummy_runner.capture(shape)
            milliseconds = 1000 * (time.monotonic() - begin)
            _log.debug("captured a graph of %s, %.1f ms", shape.described(), milliseconds)
        except Exception as error:
            if (
                self.runner.has_other_ranks
            ):  # all ranks have the same shapes, padded for graphs
                _log.warning("no more graphs are captured: %r", error)
                self.stopped = True
                return
            tried, spoiled = bool(shortcuts.trying), shortcuts.spoiled
            shortcuts.blame(error)
            if shortcuts.spoiled > spoiled:
                self.pending.append(shape)
            full = isinstance(error, torch.OutOfMemoryError)
            self.runner.captures.full |= full
            if full or not tried:
                _log.warning("no more graphs are captured: %r", error)
            # A blamed acceleration is disabled; any other failure would happen again.
            self.stopped = full or not tried
            self.runner.captures.forget(shape)

    @contextmanager
    def _step_context(self) -> Iterator[None]:
        """Enter the context in which steps run."""
        with torch.inference_mode(), on(self.runner.stream):
            yield

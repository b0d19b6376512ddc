"""Steps that serve no request: dummy steps, captures of graphs, and replays of these. All
ranks that run the model together run them, in the same order.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from attrs import define

from minfer.effects.execution.device.step_shape import StepShape
from minfer.effects.execution.packing.inputs import dummy_words
from minfer.effects.execution.ranks.items import Capture, DummyStep, Item, Replay
from minfer.effects.execution.running.device_step import DeviceStep
from minfer.effects.execution.running.draft_model import DraftModel
from minfer.effects.execution.running.own_model import OwnModel
from minfer.effects.execution.running.runner import MIN_CONTEXT_TOKENS, ModelRunner

Broadcast = Callable[[Item], None]  # has other ranks do something next


@define(eq=False)
class DummyRunner:
    """Runs these on a model runner, while no other step is in flight."""

    runner: ModelRunner
    broadcast: Broadcast | None = None  # None: nothing is sent to other ranks

    @contextmanager
    def on_one_rank(self) -> Iterator[None]:
        """Run dummy steps on this rank alone; their results are meaningless."""
        broadcast, self.broadcast = self.broadcast, None
        try:
            with self.runner.ranks.silent():
                yield
        finally:
            self.broadcast = broadcast

    @contextmanager
    def few_layers(self) -> Iterator[None]:
        """Cut the models short, for steps that only need to launch each kernel."""
        models: list[tuple[DeviceStep | DraftModel, OwnModel]] = [
            (owner, owner.model)
            for owner in (self.runner.step, self.runner.draft_model)
            if owner is not None and isinstance(owner.model, OwnModel)
        ]
        try:
            for owner, model in models:
                owner.model = model.with_few_layers()
            yield
        finally:
            for owner, model in models:
                owner.model = model

    def dummy_step(self, shape: StepShape) -> None:
        """Run a dummy step: it changes no row."""
        self._announce(DummyStep(shape))
        self._dummy_step(shape)

    def _dummy_step(self, shape: StepShape) -> None:
        rows, config = self.runner.rows, self.runner.config
        length = min(rows.blocks * config.block_size, config.max_model_len)
        words = dummy_words(shape, rows.scratch, length)
        self.runner.staging[: len(words)].copy_(torch.from_numpy(words))
        self.runner.step(shape, dummy=True)

    def capture(self, shape: StepShape) -> None:
        """Capture a shape's graph. A dummy step before it loads what its launches need,
        which a capture must not do.
        """
        self._announce(Capture(shape))
        runner = self.runner
        with runner.stage_buffers.held():
            with self.few_layers():
                self._dummy_step(shape)
            runner.shortcuts.capture()
            runner.captures.capture(shape, runner.step)

    def prepared(self, shape: StepShape) -> Callable[[], object]:
        """Returns a function that runs a dummy step of a shape, by a graph where such
        steps have one.
        """
        shape = self.runner.with_splits(self.runner.padded(shape), MIN_CONTEXT_TOKENS)
        if not self.runner.may_be_captured(shape):
            return lambda: self.dummy_step(shape)
        if shape not in self.runner.captures.graphs:
            self.capture(shape)
        self.dummy_step(shape)  # fills the graph's inputs with the scratch row
        return lambda: self.replay(shape)

    def replay(self, shape: StepShape) -> None:
        """Replay the graph of a shape; its inputs are left from an earlier dummy step."""
        self._announce(Replay(shape))
        runner, device_rows = self.runner, self.runner.rows
        device_rows.batch.fill_(device_rows.scratch)
        device_rows.sampling_split.fill_(device_rows.scratch)
        if (graph := runner.captures.graphs.get(shape)) is None:  # on this rank
            self._dummy_step(shape)
        else:
            runner.stage_buffers.replay(graph, shape.inputs)

    def _announce(self, item: Item) -> None:
        """Have the other ranks do the same, if items are sent to them."""
        if self.broadcast is not None:
            self.broadcast(item)

"""The launches of a step, from the words on the device to the sampled tokens.

Theory. They are a function of the step's `StepShape` (step_shape.py) and of the device's
state, so they can be launched one by one, or captured as a CUDA graph and replayed.
"""

from attrs import define, evolve
from torch import Tensor

from minfer.effects.execution.device.backend import Cache
from minfer.effects.execution.device.device_rows import DeviceRows
from minfer.effects.execution.device.routes import Routes
from minfer.effects.execution.device.step_shape import StepShape
from minfer.effects.execution.packing.extra_outputs import ExtraOutputs
from minfer.effects.execution.packing.inputs import ForwardWords, PrefillWords
from minfer.effects.execution.running.batch_builder import (
    BatchBuilder,
    StepRows,
    logit_inputs,
    verified_of,
)
from minfer.effects.execution.running.drafter import Drafter
from minfer.effects.execution.running.prefill_chunks import prefill_chunks
from minfer.effects.execution.running.rejection_sampling import PlaceDrafts
from minfer.effects.execution.running.sampler import Sampler
from minfer.effects.execution.running.shortcuts import Shortcuts
from minfer.effects.execution.running.speculative_step import (
    Forwarded,
    speculative_step,
)
from minfer.effects.models.architecture.batch import LayerStates, PrefillChunks
from minfer.effects.models.architecture.model import Model
from minfer.kernels.packages import QUACK


@define(eq=False)
class DeviceStep:
    """Launches steps of a model: called with a step's shape."""

    model: Model
    cache: Cache
    rows: DeviceRows
    staging: Tensor  # the words of the step
    batch_builder: BatchBuilder
    drafter: Drafter | None
    sampler: Sampler
    routes: Routes
    shortcuts: Shortcuts

    def __call__(
        self, shape: StepShape, dummy: bool = False, extra: ExtraOutputs | None = None
    ) -> None:
        """Run a whole step, from the words on the device to the sampler's `out` and the
        rows.

        `dummy`: a dummy step. The scratch row takes the place of all decode rows here,
        and of all other rows in the words (`dummy_words`).
        """
        words = ForwardWords.of(self.staging, shape)
        if words.deferred is not None:
            rows, positions = words.deferred.rows, words.deferred.positions
            self.sampler.sample_kept(rows, positions, shape.sampling_needs)
            return
        decode_rows = self.rows.batch[: shape.decode_rows]
        if dummy:
            decode_rows = decode_rows.new_full((shape.decode_rows,), self.rows.scratch)
        if words.prefill is not None:
            decode_rows = words.prefill.draws[0, : shape.decode_rows]
        step = StepRows(decode_rows, None, words.prefill, dummy)
        if words.drafts is not None:
            speculative_step(self, shape, words, step, words.drafts, extra)
            return
        forwarded = self.forward(shape, words, step, extra)
        self.sample_first(shape, words, step, forwarded.logits, forwarded.positions)

    def forward(
        self,
        shape: StepShape,
        words: ForwardWords[Tensor],
        step: StepRows,
        extra: ExtraOutputs | None,
    ) -> Forwarded:
        """Run the model."""
        inputs = self.batch_builder.decode_inputs(step)
        verified = None
        if words.drafts is not None:
            verified = verified_of(shape, words.drafts, inputs)
        batch = self.batch_builder.batch(
            step,
            inputs,
            logit_inputs(shape, words),
            self._chunks(shape, words.prefill),
            splits=shape.splits,
            fused=self._fuses(shape),
            verified=verified,
            adapters=shape.adapters,
        )
        batch = extra.add_to(batch) if extra else batch
        reads_states = self.drafter is not None and self.drafter.layers
        if self.drafter is None or not reads_states:
            logits = self.model(batch, self.cache)
            return Forwarded(logits, inputs.ahead, batch.pending)
        batch = evolve(batch, layer_states=LayerStates(self.drafter.layers))
        logits = self.model(batch, self.cache)
        drafter_rows = self.drafter.read_target(shape, step, batch)
        return Forwarded(logits, inputs.ahead, batch.pending, drafter_rows)

    def sample_first(
        self,
        shape: StepShape,
        words: ForwardWords[Tensor],
        step: StepRows,
        logits: Tensor,
        positions: Tensor,
        drafts: PlaceDrafts | None = None,
    ) -> Tensor:
        """Sample after the last token of each row; returns the rows that sampled.

        `logits` are [draws, vocab], `positions` those after all inputs; `drafts`: see
        `Sampler.sample`. Logits of rows with deferred sampling are kept.
        """
        rows, ahead = step.decode_rows, positions[: shape.draws]
        if not shape.draws:
            return rows
        if words.prefill is not None:
            rows, drawn = words.prefill.draws.unbind(0)
            ahead = positions.index_select(0, drawn)
        if shape.keeps_logits:
            lines = words.sampling_split
            if lines is None:
                lines = self.rows.sampling_split[:, : shape.draws]
            now, deferred = (rows, rows) if step.dummy else lines.unbind(0)
            self.sampler.keep(logits, deferred)
            rows = now
        self.sampler.sample(logits, rows, ahead, shape.sampling_needs, drafts=drafts)
        return rows

    def _fuses(self, shape: StepShape) -> bool:
        fuses = self.shortcuts.fused and self.routes.fuses(shape.inputs)
        return fuses and self.shortcuts.can_use(QUACK)

    def _chunks(
        self, shape: StepShape, prefill: PrefillWords[Tensor] | None
    ) -> PrefillChunks | None:
        if prefill is None:
            return None
        size = self.batch_builder.block_size
        return prefill_chunks(
            shape, prefill, self.rows.table, size, self.routes, self.shortcuts
        )

"""A draft model beside its target: it makes drafts on the device, within the step that
verifies them.

Theory. A draft model has its own weights and cache, and shares everything else: rows and
their block tables, sampling values, noise. So it samples what the target is likely to
sample, with each request's own parameters (a draft equals the target's token with a
probability of at least (1 - TV) / (1 + TV); `minfer.speculate.accept`). Only with
rejection sampling does it use separate noise, and keep its logits
(rejection_sampling.py). A step of the target begins with the draft model's forwards:

    the first    takes all decode rows, each with its last token and the
                 one before; from the last comes the first draft
    each other   takes the drafts of the one before

The token before the last is included because the draft model has not run it, if all
drafts were accepted and it was the last of them; else the same values are written again.
The draft model does not run for prompts and for steps without drafts; it computes the
missing tokens before rows get drafts (catching_up.py). Tokens that are still missing
change the acceptance rate and nothing else. Nor does the choice of the draft model: token
ids that the target does not have are never drafted, and the draft model reads ids that it
does not have itself as another id.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from attrs import define, frozen
from torch import Tensor

from minfer.effects.execution.device.backend import Cache
from minfer.effects.execution.device.device_rows import Words
from minfer.effects.execution.device.routes import Routes
from minfer.effects.execution.device.step_shape import StepShape
from minfer.effects.execution.device.streams import host_words
from minfer.effects.execution.packing.inputs import DraftWords, ForwardWords, PrefillWords
from minfer.effects.execution.running.batch_builder import (
    BatchBuilder,
    StepRows,
    chunks_of,
)
from minfer.effects.execution.running.drafter import propose_by_place
from minfer.effects.execution.running.rejection_sampling import DraftProposal
from minfer.effects.execution.running.sampler import Sampler
from minfer.effects.models.architecture.batch import Batch, PrefillChunks
from minfer.effects.models.architecture.model import Model
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.weights import Weights
from minfer.records.config import EngineConfig


@frozen(eq=False)
class LoadedDraft:
    """A loaded draft model."""

    spec: ModelSpec
    weights: Weights | Model


@define(eq=False)
class DraftModel:
    """Drafts for the rows of one device."""

    spec: ModelSpec
    model: Model
    cache: Cache
    batch_builder: BatchBuilder
    routes: Routes

    @classmethod
    def open(
        cls,
        spec: ModelSpec,
        model: Model,
        batch_builder: BatchBuilder,
        config: EngineConfig,
        length: int,
    ) -> "DraftModel":
        """Build with a cache for positions below `length`. Raises MemoryError or
        torch.OutOfMemoryError.
        """
        blocks, size = config.num_blocks, config.block_size
        cache = batch_builder.backend.make_cache(spec, blocks, size, length)
        cache.data.zero_()  # slots never written may be read, and must be finite
        return cls(
            spec,
            model,
            cache,
            batch_builder,
            batch_builder.backend.routes_of(spec, config),
        )

    @property
    def caches(self) -> tuple[Cache, ...]:
        """Its own."""
        return (self.cache,)

    @property
    def layers(self) -> tuple[int, ...]:
        """None: it reads tokens alone."""
        return ()

    def splits(self, shape: StepShape, context: int) -> tuple[int, ...]:
        """Returns the splits of the draft model's contexts in steps of a shape."""
        return self.routes.splits(max(1, shape.verified), context)

    def propose(
        self,
        shape: StepShape,
        step: StepRows,
        drafts: DraftWords[Tensor],
        sampler: Sampler,
    ) -> list[DraftProposal]:
        """Draft for `verified` rows, place by place."""

        def logits_of(place: int, inputs: StepRows) -> Tensor:
            if not place:
                return self._first_logits(shape, step, shape.verified)
            return self._to_target_vocab(self._forward(shape, inputs))

        rows = self.batch_builder.rows
        return propose_by_place(rows, shape, step, drafts, sampler, logits_of)

    def read_target(self, shape: StepShape, step: StepRows, batch: Batch) -> None:
        """Do nothing: it reads tokens alone."""

    def catch_up(self, forwards: Sequence[tuple[StepShape, Words]]) -> None:
        """Compute chunks of rows that this call sends (catching_up.py)."""
        device = self.batch_builder.backend.device
        for shape, words in forwards:
            host = host_words(words.shape, device)
            host.numpy()[:] = words
            # Torch keeps the source of a copy until it is done.
            prefill = ForwardWords.of(host.to(device, non_blocking=True), shape).prefill
            if prefill is not None:
                self.absorb(shape, prefill)

    def absorb(self, shape: StepShape, prefill: PrefillWords[Tensor]) -> None:
        """Write keys and values of chunks, without sampling."""
        no_rows = self.batch_builder.rows.batch[:0]
        step = StepRows(no_rows, None, prefill)
        self._forward(shape, step, no_rows, chunks_of(shape, prefill))

    def _first_logits(self, shape: StepShape, step: StepRows, count: int) -> Tensor:
        """Run the first forward; returns logits of the first `count` rows."""
        rows, decode_rows = self.batch_builder.rows, step.decode_rows
        previous_tokens = rows.previous.index_select(0, decode_rows)
        positions = (rows.next.index_select(0, decode_rows) - 1).clamp(min=0)
        extra_inputs = torch.stack((previous_tokens, positions, decode_rows))
        sample = torch.arange(count, dtype=torch.int32, device=decode_rows.device)
        inputs = StepRows(decode_rows, extra_inputs, dummy=step.dummy)
        return self._to_target_vocab(self._forward(shape, inputs, sample))

    def _forward(
        self,
        shape: StepShape,
        step: StepRows,
        sample: Tensor | None = None,
        chunks: PrefillChunks | None = None,
    ) -> Tensor:
        decode_inputs = self.batch_builder.decode_inputs(step)
        if self.spec.vocab_size < self.batch_builder.rows.vocab:
            decode_inputs.tokens.clamp_(max=self.spec.vocab_size - 1)
        batch = self.batch_builder.batch(
            step, decode_inputs, sample, chunks, splits=shape.draft_splits
        )
        return self.model(batch, self.cache)

    def _to_target_vocab(self, logits: Tensor) -> Tensor:
        """Returns logits over the target's vocabulary."""
        num_missing = self.batch_builder.rows.vocab - logits.shape[1]
        if num_missing <= 0:
            return logits[:, : logits.shape[1] + num_missing].contiguous()
        return F.pad(logits, (0, num_missing), value=-torch.inf)

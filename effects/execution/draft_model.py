"""A draft model beside its target: it makes drafts on the device, within the step that
verifies them.

Theory. A draft model has weights and a cache of its own, and shares everything else: rows
and their block tables, sampling values, noise. So it draws what the target is likely to
draw, for each row as that row's request asks (a draft equals the target's token with a
probability of (1 - TV) / (1 + TV) at least; `minfer.speculate.accept`). Only where coins
let drafts stand is its noise another, and what it drew from is kept (rejecting.py). A
step of the target begins with its forwards:

    the first    takes all rows that feed themselves, each with its last token and the
                 one before; from the last comes the first draft
    each other   takes the drafts of the one before

The token before is there because nobody has run it, if it was the last of drafts that
were all accepted; else it is written again as it was. Prompts, and steps in which nobody
has a draft, leave the draft model alone; what its cache lacks then is made up for before
rows draft (catching_up.py). What it lacks all the same changes how often it is right and
nothing else. Nor does what it is: ids that its target does not know are never drafted,
those that it does not know itself it reads as another.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from attrs import define, frozen
from torch import Tensor

from minfer.config import EngineConfig
from minfer.effects.execution.backend import Cache
from minfer.effects.execution.device_rows import Words
from minfer.effects.execution.feeding import Feeder, Step, chunks_of
from minfer.effects.execution.inputs import Drafts, History, Inputs
from minfer.effects.execution.rejecting import Guess
from minfer.effects.execution.sampler import Sampler
from minfer.effects.execution.step_shape import StepShape
from minfer.effects.execution.streams import host_words
from minfer.effects.models.batch import Chunks
from minfer.effects.models.model import Model
from minfer.effects.models.spec import ModelSpec
from minfer.effects.models.weights import Weights


@frozen(eq=False)
class DraftOf:
    """A draft model as it was loaded."""

    spec: ModelSpec
    weights: Weights | Model


@define(eq=False)
class DraftModel:
    """What drafts for the rows of one device."""

    spec: ModelSpec
    model: Model
    cache: Cache
    feeder: Feeder

    @classmethod
    def open(
        cls,
        spec: ModelSpec,
        model: Model,
        feeder: Feeder,
        config: EngineConfig,
        length: int,
    ) -> "DraftModel":
        """With a cache for positions below `length`. Raises MemoryError or
        torch.OutOfMemoryError.
        """
        blocks, size = config.num_blocks, config.block_size
        cache = feeder.backend.make_cache(spec, blocks, size, length)
        cache.data.zero_()  # what it never wrote, it may read, and is to be finite
        return cls(spec, model, cache, feeder)

    def num_splits(self, shape: StepShape, context: int) -> int:
        """As the backend's, of a kind's steps."""
        backend = self.feeder.backend
        return backend.num_splits(max(1, shape.verified), self.spec, context)

    def propose(
        self, shape: StepShape, step: Step, drafts: Drafts[Tensor], sampler: Sampler
    ) -> list[Guess]:
        """Draft for `verified` rows, place by place, in a step whose rows feed themselves
        so.
        """
        rows, count = self.feeder.rows, shape.verified
        logits = self._first(shape, step, count)
        who, nexts = (
            step.decoding[:count],
            rows.next.index_select(0, step.decoding[:count]),
        )
        made = list[Guess]()
        for place in range(shape.drafts):
            if place:
                # Whoever wants no draft here takes part no more.
                who = who.where(drafts.counts > place, rows.scratch)
                positions = (nexts + place).where(drafts.counts > place, 0)
                given = torch.stack((made[-1].tokens, positions, who))
                logits = self._forward(
                    shape, Step(step.decoding[:0], given, dry=step.dry)
                )
            ahead = nexts + (place + 1)
            made.append(sampler.guess(self._fitted(logits), who, ahead, shape.wants))
        return made

    def catch_up(self, forwards: Sequence[tuple[StepShape, Words]]) -> None:
        """Take chunks of rows, sent here for this alone (catching_up.py)."""
        device = self.feeder.backend.device
        for shape, words in forwards:
            host = host_words(words.shape, device)
            host.numpy()[:] = words
            # Torch keeps what is copied from until it has been.
            history = Inputs.of(host.to(device, non_blocking=True), shape).history
            if history is not None:
                self.absorb(shape, history)

    def absorb(self, shape: StepShape, history: History[Tensor]) -> None:
        """Take chunks of rows for their keys and values alone."""
        nobody = self.feeder.rows.batch[:0]
        step = Step(nobody, None, history)
        self._forward(shape, step, nobody, chunks_of(shape, history))

    def _first(self, shape: StepShape, step: Step, count: int) -> Tensor:
        """The first forward; logits of the first `count` rows."""
        rows, decoding = self.feeder.rows, step.decoding
        before = rows.previous.index_select(0, decoding)
        positions = (rows.next.index_select(0, decoding) - 1).clamp(min=0)
        further = torch.stack((before, positions, decoding))
        sample = torch.arange(count, dtype=torch.int32, device=decoding.device)
        return self._forward(shape, Step(decoding, further, dry=step.dry), sample)

    def _forward(
        self,
        shape: StepShape,
        step: Step,
        sample: Tensor | None = None,
        chunks: Chunks | None = None,
    ) -> Tensor:
        decode_inputs = self.feeder.decode_inputs(step)
        if self.spec.vocab_size < self.feeder.rows.vocab:
            decode_inputs.tokens.clamp_(max=self.spec.vocab_size - 1)
        batch = self.feeder.batch(
            step, decode_inputs, sample, chunks, splits=shape.draft_splits
        )
        return self.model(batch, self.cache)

    def _fitted(self, logits: Tensor) -> Tensor:
        """Logits over the target's vocabulary."""
        more = self.feeder.rows.vocab - logits.shape[1]
        if more <= 0:
            return logits[:, : logits.shape[1] + more].contiguous()
        return F.pad(logits, (0, more), value=-torch.inf)

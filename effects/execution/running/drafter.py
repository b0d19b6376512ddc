"""What makes drafts on the device, within the step that verifies them.

Theory. A *drafter* proposes tokens for the rows that have drafts, place by place: the
first from a row's last token, each other from the token of the place before. There are
two: a draft model (draft_model.py), with a cache of its own, which reads tokens alone;
and a draft head (draft_head.py), a layer behind the target, which also reads the target's
hidden states, and keeps its keys in the target's cache. Drafts of lookups are the host's.

Both sample with each row's own parameters and with the noise of each position, so a draft
is likely to equal the target's token; with rejection sampling, with noise of their own.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from minfer.effects.execution.device.backend import Cache
from minfer.effects.execution.device.device_rows import DeviceRows
from minfer.effects.execution.device.step_shape import StepShape
from minfer.effects.execution.packing.inputs import DraftWords
from minfer.effects.execution.running.batch_builder import StepRows
from minfer.effects.execution.running.rejection_sampling import DraftProposal
from minfer.effects.execution.running.sampler import Sampler
from minfer.effects.models.architecture.batch import Batch
from minfer.effects.models.architecture.spec import ModelSpec

# The place of a draft and its inputs: logits [verified, vocab] after them.
PlaceLogits = Callable[[int, StepRows], Tensor]


class PendingRows(Protocol):
    """What a drafter keeps of rows with drafts once it is known which are accepted."""

    def accept(self, num_accepted: Tensor) -> None:
        """Keep it, given the accepted drafts [rows with drafts] int32 of each row."""
        ...


class Drafter(Protocol):
    """Makes drafts for the rows of one device."""

    @property
    def spec(self) -> ModelSpec:
        """The model whose kernels it launches: its own, or the target with its layer."""
        ...

    @property
    def caches(self) -> tuple[Cache, ...]:
        """Its own caches beside the target's."""
        ...

    @property
    def layers(self) -> tuple[int, ...]:
        """The target's layers whose input it reads, as of `LayerStates`."""
        ...

    def splits(self, shape: StepShape, context: int) -> tuple[int, ...]:
        """Returns the splits of its contexts in steps of a shape."""
        ...

    def propose(
        self,
        shape: StepShape,
        step: StepRows,
        drafts: DraftWords[Tensor],
        sampler: Sampler,
    ) -> list[DraftProposal]:
        """Returns the drafts of the first `verified` rows, place by place."""
        ...

    def read_target(
        self, shape: StepShape, step: StepRows, batch: Batch
    ) -> PendingRows | None:
        """Take the target's hidden states of a step that it has just run; returns what
        waits for accepted drafts, if anything does.
        """
        ...


def propose_by_place(
    rows: DeviceRows,
    shape: StepShape,
    step: StepRows,
    drafts: DraftWords[Tensor],
    sampler: Sampler,
    logits_of: PlaceLogits,
) -> list[DraftProposal]:
    """Returns drafts of the first `verified` rows, each place after the one before."""
    drafting_rows = step.decode_rows[: shape.verified]
    nexts = rows.next.index_select(0, drafting_rows)
    inputs = StepRows(drafting_rows, None, dummy=step.dummy)
    proposals = list[DraftProposal]()
    for place in range(shape.drafts):
        if place:
            # Rows with fewer drafts are replaced by the scratch row.
            drafting_rows = drafting_rows.where(drafts.counts > place, rows.scratch)
            positions = (nexts + place).where(drafts.counts > place, 0)
            lines = torch.stack((proposals[-1].tokens, positions, drafting_rows))
            inputs = StepRows(step.decode_rows[:0], lines, dummy=step.dummy)
        logits = logits_of(place, inputs)
        ahead = nexts + (place + 1)
        proposals.append(
            sampler.propose(logits, drafting_rows, ahead, shape.sampling_needs)
        )
    return proposals

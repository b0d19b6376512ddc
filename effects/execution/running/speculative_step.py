"""Speculative decoding of a step on the device: draft, verify, accept, advance.

Theory. A row that has drafts samples at its last token as always. Its drafts are further
inputs of the same forward, so the logits after each of them are there, too: while the
sampled token equals the next draft, the row samples once more, after that draft. So it
yields its accepted drafts and one more token, the same tokens as without drafts.
packing/verified.py has the layout on the host, catching_up.py the prompts of the draft
model.

All launches are in order and depend on the number of places only, not on values, so a
graph can hold them.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from attrs import evolve, frozen
from torch import Tensor

from minfer.effects.execution.device.device_rows import DeviceRows, aligned
from minfer.effects.execution.device.step_shape import StepShape
from minfer.effects.execution.packing.extra_outputs import ExtraOutputs
from minfer.effects.execution.packing.inputs import DraftWords, ForwardWords
from minfer.effects.execution.running.batch_builder import StepRows
from minfer.effects.execution.running.drafter import Drafter, PendingRows
from minfer.effects.execution.running.rejection_sampling import (
    DraftProposal,
    PlaceDrafts,
    drafts_by_place,
)
from minfer.effects.execution.running.sampler import Sampler
from minfer.effects.models.architecture.pending_states import PendingStates


@frozen(eq=False)
class Forwarded:
    """What a forward of the model returns."""

    logits: Tensor  # [draws, vocab], those after drafts last
    positions: Tensor  # after the inputs
    # What recurrent layers kept of rows with drafts, if there are both
    pending: PendingStates | None = None
    # What the drafter keeps of rows with drafts, if it reads hidden states
    drafter_rows: PendingRows | None = None


class StepParts(Protocol):
    """What a step consists of: a `DeviceStep`."""

    rows: DeviceRows
    sampler: Sampler
    drafter: Drafter | None

    def forward(
        self,
        shape: StepShape,
        words: ForwardWords[Tensor],
        step: StepRows,
        extra: ExtraOutputs | None,
    ) -> Forwarded:
        """Run the model."""
        ...

    def sample_first(
        self,
        shape: StepShape,
        words: ForwardWords[Tensor],
        step: StepRows,
        logits: Tensor,
        positions: Tensor,
        drafts: PlaceDrafts | None = None,
    ) -> Tensor:
        """Sample after the last token of each row; returns the rows that sampled."""
        ...


def speculative_step(
    device_step: StepParts,
    shape: StepShape,
    words: ForwardWords[Tensor],
    step: StepRows,
    drafts: DraftWords[Tensor],
    extra: ExtraOutputs | None = None,
) -> None:
    """Run a step whose first `shape.verified` decode rows have drafts."""
    sampler, count = device_step.sampler, shape.verified

    # Draft. The host's drafts came with the step's words. The drafter makes the others,
    # place by place: from the rows' last tokens, then from its own drafts.
    proposals = list[DraftProposal]()
    if device_step.drafter is not None and shape.proposes:
        proposals = device_step.drafter.propose(shape, step, drafts, sampler)

    # Verify. The target takes drafts as inputs behind the rows' last tokens: one forward
    # returns the logits after all of them.
    step, tokens, owners = with_draft_inputs(device_step, step, drafts, proposals)
    forwarded = device_step.forward(shape, words, step, extra)
    logits, positions = forwarded.logits, forwarded.positions
    first, after_drafts = logits[: shape.draws], logits[shape.draws :]

    # All rows sample after their last tokens, as in steps without drafts. (Under the rule
    # "rejection" coins decide where a row has a draft: rejection_sampling.py.)
    by_place = drafts_by_place(device_step.rows, drafts, tokens, owners, proposals)
    sampled = device_step.sample_first(shape, words, step, first, positions, by_place[0])
    sampled = sampled[:count]  # deferred rows are not among them
    accepted = sampler.out[shape.draft_line(shape.drafts) :][:count]
    for place in range(shape.drafts):
        # Accept. The draft equals the token that its row just sampled. All other rows are
        # replaced by the scratch row, for the rest of the step.
        rows, positions = new_lines(sampled, 2, count)
        sampler.backend.accept_drafts(
            before=sampled,
            drafts=tokens[place],
            owners=owners[place],
            state=device_step.rows.state,
            place=place,
            next_rows=rows,
            positions=positions,
            accepted=accepted,
        )
        if rows.device.type == "cpu" and bool((rows == device_step.rows.scratch).all()):
            break  # all were rejected; a GPU's host does not wait to know it

        # Advance. Accepted rows sample after this draft; the sampler stores each token
        # and its position as the row's last.
        place_logits = after_drafts[place * count :][:count]
        line = shape.draft_line(place)
        sampler.sample(
            place_logits, rows, positions, shape.sampling_needs, line, by_place[place + 1]
        )
        sampled = rows

    # Update the states of recurrent layers, which no rejected draft may change.
    if forwarded.pending is not None:
        forwarded.pending.accept(accepted)
    # Keep the hidden states that the drafter reads next.
    if forwarded.drafter_rows is not None:
        forwarded.drafter_rows.accept(accepted)


def with_draft_inputs(
    device_step: StepParts,
    step: StepRows,
    drafts: DraftWords[Tensor],
    proposals: Sequence[DraftProposal],
) -> tuple[StepRows, Tensor, Tensor]:
    """Returns the step with its drafts as further inputs, and [places, verified] each:
    their tokens, and their rows, which are the scratch row where there is no draft.
    `proposals` are the drafter's, if it makes any.
    """
    proposed = (
        torch.stack([proposal.tokens for proposal in proposals]) if proposals else None
    )
    places, count = drafts.tokens.shape
    out = new_lines(step.decode_rows, 3, places * count)
    device_step.sampler.backend.write_draft_inputs(
        rows=step.decode_rows[:count],
        counts=drafts.counts,
        drafts=drafts.tokens,
        proposed=proposed,
        state=device_step.rows.state,
        out=out,
    )
    tokens, _, owners = out.view(3, places, count).unbind(0)
    return evolve(step, extra_inputs=out), tokens, owners


def new_lines(like: Tensor, lines: int, count: int) -> Tensor:
    """Returns new memory [lines, count], whose lines are aligned."""
    return like.new_empty(lines, aligned(count))[:, :count]

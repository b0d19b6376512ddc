"""Drafts on the device: as inputs of a step, and verified after the model ran.

All launches are in order and depend on the number of places only, not on values, so a
graph can hold them; see verified.py.
"""

from collections.abc import Sequence

import torch
from attrs import evolve
from torch import Tensor

from minfer.effects.execution.device.backend import Backend
from minfer.effects.execution.device.device_rows import DeviceRows, aligned
from minfer.effects.execution.device.step_shape import StepShape
from minfer.effects.execution.packing.inputs import DraftWords
from minfer.effects.execution.running.feeding import StepRows
from minfer.effects.execution.running.rejection_sampling import Proposal, drafts_by_place
from minfer.effects.execution.running.sampler import Sampler


def spread(
    backend: Backend,
    rows: DeviceRows,
    step: StepRows,
    drafts: DraftWords[Tensor],
    guesses: Sequence[Proposal],
) -> StepRows:
    """Returns a step with drafts as further inputs, [3, drafts * verified]; `guesses` are
    the draft model's, if it makes them.
    """
    proposed = torch.stack([guess.tokens for guess in guesses]) if guesses else None
    most, verified = drafts.tokens.shape
    decode_rows = step.decode_rows
    out = decode_rows.new_empty(3, aligned(most * verified))[:, : most * verified]
    backend.write_draft_inputs(
        rows=decode_rows[:verified],
        counts=drafts.counts,
        drafts=drafts.tokens,
        proposed=proposed,
        next_=rows.next,
        scratch=rows.scratch,
        out=out,
    )
    return evolve(
        step,
        extra_inputs=out,
        drafts_by_place=drafts_by_place(rows, drafts, out, guesses),
    )


def judge(sampler: Sampler, shape: StepShape, step: StepRows, logits: Tensor) -> None:
    """Verify drafts after each decode row has sampled its first token: rows whose draft
    is accepted sample another one, place by place.

    `step` is as `spread` returns it, `logits` [drafts * verified, vocab] are of its
    further inputs.
    """
    behind = dict(enumerate(step.drafts_by_place[1:]))
    if step.extra_inputs is None:
        raise AssertionError("a step without drafts is not judged")
    rows, count = sampler.rows, shape.verified
    first, apart = aligned(shape.draws), aligned(count)
    tokens, _, owners = step.extra_inputs.view(3, shape.drafts, count).unbind(0)
    accepted = sampler.out[first + shape.drafts * apart :][:count]
    before = step.decode_rows[:count]
    at_once = before.device.type == "cpu"
    for place in range(shape.drafts):
        next_rows, positions = before.new_empty(2, apart)[:, :count]
        sampler.backend.accept_drafts(
            before=before,
            drafts=tokens[place],
            owners=owners[place],
            last=rows.last,
            next_=rows.next,
            place=place,
            scratch=rows.scratch,
            next_rows=next_rows,
            positions=positions,
            accepted=accepted,
        )
        if at_once and bool((next_rows == rows.scratch).all()):
            # all drafts were rejected; on the CPU nothing is captured, so this can be
            # tested
            return
        here, at = logits[place * count : (place + 1) * count], first + place * apart
        sampler.sample(here, next_rows, positions, shape.wants, at, behind.get(place))
        before = next_rows

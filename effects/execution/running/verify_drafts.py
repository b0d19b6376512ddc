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
from minfer.effects.execution.packing.inputs import Drafts
from minfer.effects.execution.running.feeding import Step
from minfer.effects.execution.running.rejection_sampling import Guess, contests
from minfer.effects.execution.running.sampler import Sampler


def spread(
    backend: Backend,
    rows: DeviceRows,
    step: Step,
    drafts: Drafts[Tensor],
    guesses: Sequence[Guess],
) -> Step:
    """Returns a step with drafts as further inputs, [3, drafts * verified]; `guesses` are
    the draft model's, if it makes them.
    """
    proposed = torch.stack([guess.tokens for guess in guesses]) if guesses else None
    most, verified = drafts.said.shape
    decoding = step.decoding
    out = decoding.new_empty(3, aligned(most * verified))[:, : most * verified]
    backend.spread(
        rows=decoding[:verified],
        counts=drafts.counts,
        said=drafts.said,
        proposed=proposed,
        next_=rows.next,
        scratch=rows.scratch,
        out=out,
    )
    return evolve(step, further=out, contests=contests(rows, drafts, out, guesses))


def judge(sampler: Sampler, shape: StepShape, step: Step, logits: Tensor) -> None:
    """Verify drafts after each decode row has sampled its first token: rows whose draft
    is accepted sample another one, place by place.

    `step` is as `spread` returns it, `logits` [drafts * verified, vocab] are of its
    further inputs.
    """
    behind = dict(enumerate(step.contests[1:]))
    if step.further is None:
        raise AssertionError("a step without drafts is not judged")
    rows, count = sampler.rows, shape.verified
    first, apart = aligned(shape.draws), aligned(count)
    tokens, _, owners = step.further.view(3, shape.drafts, count).unbind(0)
    accepted = sampler.out[first + shape.drafts * apart :][:count]
    before = step.decoding[:count]
    at_once = before.device.type == "cpu"
    for place in range(shape.drafts):
        who, positions = before.new_empty(2, apart)[:, :count]
        sampler.backend.stand(
            before=before,
            drafts=tokens[place],
            owners=owners[place],
            last=rows.last,
            next_=rows.next,
            place=place,
            scratch=rows.scratch,
            who=who,
            positions=positions,
            accepted=accepted,
        )
        if at_once and bool((who == rows.scratch).all()):
            # all drafts were rejected; on the CPU nothing is captured, so this can be
            # tested
            return
        here, at = logits[place * count : (place + 1) * count], first + place * apart
        sampler.sample(here, who, positions, shape.wants, at, behind.get(place))
        before = who

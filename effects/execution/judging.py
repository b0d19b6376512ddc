"""Drafts on the device: as inputs of a step, and judged once the model ran.

All of it is launched in order, by number of places and not by what they hold, so it can
be captured; verified.py says how.
"""

from collections.abc import Callable, Sequence

import torch
from attrs import evolve
from torch import Tensor

from minfer.effects.execution.backend import Backend
from minfer.effects.execution.device_rows import DeviceRows, aligned
from minfer.effects.execution.feeding import Step
from minfer.effects.execution.inputs import Drafts, Late
from minfer.effects.execution.kinds import Kind
from minfer.effects.execution.rejecting import Guess, contests
from minfer.effects.execution.sampler import Sampler

# For a place behind a draft, of rows and at positions, to lines of what is drawn from one
# on.
Draw = Callable[[int, Tensor, Tensor, int], None]


def spread(
    backend: Backend,
    rows: DeviceRows,
    step: Step,
    drafts: Drafts[Tensor],
    guesses: Sequence[Guess],
) -> Step:
    """A step with drafts as further inputs, [3, drafts * verified]; `guesses` are what a
    draft model says, if one does.
    """
    proposed = torch.stack([guess.tokens for guess in guesses]) if guesses else None
    most, verified = drafts.said.shape
    selves = step.selves
    out = selves.new_empty(3, aligned(most * verified))[:, : most * verified]
    backend.spread(
        rows=selves[:verified],
        counts=drafts.counts,
        said=drafts.said,
        proposed=proposed,
        next_=rows.next,
        scratch=rows.scratch,
        out=out,
    )
    return evolve(step, further=out, contests=contests(rows, drafts, out, guesses))


def judge(sampler: Sampler, kind: Kind, step: Step, logits: Tensor) -> None:
    """Go on with those rows whose drafts stand; each that feeds itself has just drawn.

    `step` is as `spread` has made it, `logits` [drafts * verified, vocab] are of its
    further inputs.
    """
    behind = dict(enumerate(step.contests[1:]))
    count = kind.verified

    def draw(place: int, who: Tensor, positions: Tensor, at: int) -> None:
        here = logits[place * count : (place + 1) * count]
        sampler.sample(here, who, positions, kind.wants, at, behind.get(place))

    _judge(sampler, kind, step, draw)


def draw_late(
    sampler: Sampler, kind: Kind, late: Late[Tensor], drafts: Drafts[Tensor] | None
) -> None:
    """Draw for rows that were sampled apart, and go on with those whose drafts stand:
    whatever the rule is, those that are drawn.
    """
    sampler.sample_kept(late.rows, late.positions, kind.wants)
    behind = late.behind
    if drafts is None or behind is None:
        return

    def draw(place: int, who: Tensor, positions: Tensor, at: int) -> None:
        masks = aligned(kind.draws) + place * aligned(kind.verified)
        which = behind[place]
        sampler.sample_behind(which, masks, who, positions, kind.wants, at)

    # Where they are does not matter any more, as these are no inputs.
    step = spread(sampler.backend, sampler.rows, Step(late.rows), drafts, ())
    _judge(sampler, kind, step, draw)


def _judge(sampler: Sampler, kind: Kind, step: Step, draw: Draw) -> None:
    """Place by place: who goes on, and `draw` for them."""
    if step.further is None:
        raise AssertionError("a step without drafts is not judged")
    rows, count = sampler.rows, kind.verified
    first, apart = aligned(kind.draws), aligned(count)
    tokens, _, owners = step.further.view(3, kind.drafts, count).unbind(0)
    accepted = sampler.out[first + kind.drafts * apart :][:count]
    before = step.selves[:count]
    at_once = before.device.type == "cpu"
    for place in range(kind.drafts):
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
            return  # nothing is captured, and it can be told at once
        draw(place, who, positions, first + place * apart)
        before = who

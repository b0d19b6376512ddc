"""Drafts on the device: as inputs of a step, and judged once the model ran.

All of it is launched in order, by number of places and not by what they hold, so it can
be captured; verified.py says how.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from minfer.effects.execution.backend import Backend
from minfer.effects.execution.device_rows import DeviceRows, aligned
from minfer.effects.execution.inputs import Drafts
from minfer.effects.execution.kinds import Kind
from minfer.effects.execution.rejecting import Contest, Guess
from minfer.effects.execution.sampler import Sampler


def spread(
    backend: Backend,
    rows: DeviceRows,
    selves: Tensor,
    drafts: Drafts[Tensor],
    guesses: Sequence[Guess],
) -> Tensor:
    """Drafts as inputs [3, drafts * verified], as `History.tokens` are; `selves` are the
    rows that feed themselves, `guesses` what a draft model says, if one does.
    """
    proposed = torch.stack([guess.tokens for guess in guesses]) if guesses else None
    most, verified = drafts.said.shape
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
    return out


def judge(
    sampler: Sampler,
    kind: Kind,
    selves: Tensor,
    inputs: Tensor,
    logits: Tensor,
    contests: Sequence[Contest] = (),
) -> None:
    """Go on with those of `selves`, each of whom has just drawn, whose drafts stand.

    `inputs` are as `spread` has made them, `logits` [drafts * verified, vocab] theirs;
    `contests` are the places behind the first, where coins decide.
    """
    behind = dict(enumerate(contests))
    rows, count = sampler.rows, kind.verified
    first, apart = aligned(kind.draws), aligned(count)
    tokens, _, owners = inputs.view(3, kind.drafts, count).unbind(0)
    accepted = sampler.out[first + kind.drafts * apart :][:count]
    before = selves[:count]
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
        here = logits[place * count : (place + 1) * count]
        at = first + place * apart
        sampler.sample(here, who, positions, kind.wants, at, behind.get(place))
        before = who

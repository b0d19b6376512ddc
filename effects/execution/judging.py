"""Drafts on the device: as inputs of a step, and judged once the model ran.

All of it is launched in order, by number of places and not by what they hold, so it can
be captured; verified.py says how.
"""

from collections.abc import Callable

from torch import Tensor

from minfer.effects.execution.backend import Backend
from minfer.effects.execution.device_rows import DeviceRows, aligned
from minfer.effects.execution.inputs import Drafts, Late
from minfer.effects.execution.kinds import Kind
from minfer.effects.execution.sampler import Sampler

# For a place behind a draft, of rows and at positions, to lines of what is drawn from one
# on.
Draw = Callable[[int, Tensor, Tensor, int], None]


def spread(
    backend: Backend,
    rows: DeviceRows,
    selves: Tensor,
    drafts: Drafts[Tensor],
    proposed: Tensor | None,
) -> Tensor:
    """Drafts as inputs [3, drafts * verified], as `History.tokens` are; `selves` are the
    rows that feed themselves.
    """
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
    sampler: Sampler, kind: Kind, selves: Tensor, inputs: Tensor, logits: Tensor
) -> None:
    """Go on with those of `selves`, each of whom has just drawn, whose drafts stand.

    `inputs` are as `spread` has made them, `logits` [drafts * verified, vocab] theirs.
    """
    count = kind.verified

    def draw(place: int, who: Tensor, positions: Tensor, at: int) -> None:
        here = logits[place * count : (place + 1) * count]
        sampler.sample(here, who, positions, kind.wants, at)

    _judge(sampler, kind, selves, inputs, draw)


def draw_late(
    sampler: Sampler, kind: Kind, late: Late[Tensor], drafts: Drafts[Tensor] | None
) -> None:
    """Draw for rows that were sampled apart, and go on with those whose drafts stand."""
    sampler.sample_kept(late.rows, late.positions, kind.wants)
    behind = late.behind
    if drafts is None or behind is None:
        return

    def draw(place: int, who: Tensor, positions: Tensor, at: int) -> None:
        masks = aligned(kind.draws) + place * aligned(kind.verified)
        which = behind[place]
        sampler.sample_behind(which, masks, who, positions, kind.wants, at)

    # Where they are does not matter any more, as these are no inputs.
    inputs = spread(sampler.backend, sampler.rows, late.rows, drafts, None)
    _judge(sampler, kind, late.rows, inputs, draw)


def _judge(
    sampler: Sampler, kind: Kind, selves: Tensor, inputs: Tensor, draw: Draw
) -> None:
    """Place by place: who goes on, and `draw` for them."""
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
        draw(place, who, positions, first + place * apart)
        before = who

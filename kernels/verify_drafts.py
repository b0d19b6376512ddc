"""Verification of drafts, besides the model and the sampler: drafts as inputs, and which
are accepted.

Theory. A row with drafts takes them as inputs after its last token, at the positions that
follow: `write_draft_inputs` turns them into input lines, as prefill tokens are; unused
places of rows with fewer drafts are the scratch row. Then places are verified in order. A
row samples at the place of its last token as always. If the sampled token is its first
draft, it samples at that draft's place too, and so on: `accept_drafts` finds the rows
that continue, after each sample. All others are the scratch row there, which never
advances. So the sampler is the same as without drafts, and rows end after the last
accepted draft.
"""

import triton
import triton.language as tl
from torch import Tensor

from minfer.kernels import on_triton, plain
from minfer.kernels.pdl import early, follow
from minfer.kernels.row_state import RowTensors

BLOCK = 256  # entries of a program


@triton.jit(do_not_specialize=["scratch", "verified", "line", "count", "out_line"])
def _write_draft_inputs(
    rows,
    counts,
    drafts,
    line,
    proposed,
    next_,
    scratch,
    verified,
    count,
    out,
    out_line,
    block: tl.constexpr,
):
    follow()
    lane = tl.program_id(0) * block + tl.arange(0, block)
    mask = lane < count
    place = lane // verified
    v = lane % verified
    has_draft = mask & (place < tl.load(counts + v, mask, 0))
    row = tl.load(rows + v, has_draft, 0)
    token = tl.load(drafts + place * line + v, has_draft, 0)
    token = tl.where(token < 0, tl.load(proposed + lane, has_draft, 0), token)
    position = tl.load(next_ + row, has_draft, 0) + place + 1
    tl.store(out + lane, token, mask)
    tl.store(out + out_line + lane, tl.where(has_draft, position, 0), mask)
    tl.store(out + 2 * out_line + lane, tl.where(has_draft, row, scratch), mask)


def write_draft_inputs(
    rows: Tensor,
    counts: Tensor,
    drafts: Tensor,
    proposed: Tensor | None,
    state: RowTensors,
    out: Tensor,
) -> None:
    """Drafts as inputs: of rows [verified], which have counts [verified] of them.

    drafts [places, verified]: tokens, whose lines are contiguous; for those below 0,
    `proposed` [places, verified], contiguous, has the token. next_ [device rows]: the
    positions before them. out [3, places * verified], whose lines are contiguous: tokens,
    positions, and rows, which are `scratch` if there is no draft. All are int32.
    """
    if not on_triton(rows):
        plain.write_draft_inputs(rows, counts, drafts, proposed, state, out)
        return
    count = drafts.shape[0] * drafts.shape[1]
    _write_draft_inputs[triton.cdiv(count, BLOCK),](
        rows=rows,
        counts=counts,
        drafts=drafts,
        line=drafts.stride(0),
        proposed=drafts if proposed is None else proposed,  # a kernel needs a tensor
        next_=state.next,
        scratch=state.scratch,
        verified=drafts.shape[1],
        count=count,
        out=out,
        out_line=out.stride(0),
        block=BLOCK,
        launch_pdl=early(rows),
    )


# Places of few rows are not aligned.
@triton.jit(
    do_not_specialize=["place", "scratch", "count"],
    do_not_specialize_on_alignment=["drafts", "owners"],
)
def _accept_drafts(
    before,
    drafts,
    owners,
    last,
    next_,
    place,
    scratch,
    count,
    next_rows,
    positions,
    accepted,
    block: tl.constexpr,
):
    follow()
    lane = tl.program_id(0) * block + tl.arange(0, block)
    mask = lane < count
    owner = tl.load(owners + lane, mask, 0)
    accepts = mask & (owner != scratch) & (owner == tl.load(before + lane, mask, -1))
    accepts &= tl.load(last + owner, accepts, 0) == tl.load(drafts + lane, mask, 0)
    position = tl.load(next_ + owner, accepts, 0) + 1
    tl.store(next_rows + lane, tl.where(accepts, owner, scratch), mask)
    tl.store(positions + lane, position, mask)
    written = accepts | (mask & (lane * 0 + place == 0))
    tl.store(accepted + lane, tl.where(accepts, place + 1, 0), written)


def accept_drafts(
    before: Tensor,
    drafts: Tensor,
    owners: Tensor,
    state: RowTensors,
    place: int,
    next_rows: Tensor,
    positions: Tensor,
    accepted: Tensor,
) -> None:
    """Find the rows whose draft number `place`, from 0 on, equals the token sampled in
    its place.

    before [verified]: the rows that sampled there; drafts and owners [verified]: the
    drafts, and their rows, or `scratch`. last and next_ [device rows]: the last token of
    rows, and its position. Writes [verified] each: the rows that sample next, others
    being `scratch`; the positions of those samples; and in `accepted` the number of
    accepted drafts of these rows, or 0 for all others with the first place. All are
    int32.
    """
    if not on_triton(before):
        plain.accept_drafts(
            before, drafts, owners, state, place, next_rows, positions, accepted
        )
        return
    _accept_drafts[triton.cdiv(len(before), BLOCK),](
        before=before,
        drafts=drafts,
        owners=owners,
        last=state.last,
        next_=state.next,
        place=place,
        scratch=state.scratch,
        count=len(before),
        next_rows=next_rows,
        positions=positions,
        accepted=accepted,
        block=BLOCK,
        launch_pdl=early(before),
    )

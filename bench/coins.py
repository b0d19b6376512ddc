"""Acceptance that is set: drafts of models that know nothing stand by a coin.

Theory. What speculation gains depends on how often drafts are right, and models with
random weights draft at random. So the comparison of a draft with what was drawn in its
place is decided by a coin instead: a hash of the row's stream and of the position, heads
with the probability that was set. It is tossed on the device, for each draft that is
judged, so a captured step tosses anew whenever it is replayed, and what is set can be
changed meanwhile. A coin with heads puts what was drawn in the draft's place, one with
tails puts no token there; then the engine's own kernel compares. Draft forwards,
verification, draws and that kernel run in full; tossing is a launch more for each place.

Texts mean nothing: what stands is what the target drew, behind a draft that it did not
see.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from torch import Tensor

from minfer.effects.execution import torch_executor
from minfer.effects.execution.device.device_rows import DeviceRows
from minfer.effects.execution.device.streams import wait
from minfer.effects.execution.open_backend import open_backend
from minfer.kernels import on_triton
from minfer.kernels.row_state import RowTensors
from minfer.records.speculation import MOST_DRAFTS

BLOCK: Final = 256
SIDES: Final = 2**32
NO_TOKEN: Final = -1
# A hash of 32 bits (Wellons' lowbias32): shifts and factors.
GOLDEN: Final = 0x9E3779B9
FIRST: Final = 0x7FEB352D
SECOND: Final = 0x846CA68B


@triton.jit(
    do_not_specialize=["count"], do_not_specialize_on_alignment=["owners", "heads"]
)
def _toss(
    owners,
    last,
    next_,
    streams,
    heads,
    count,
    out,
    block: tl.constexpr,
    golden: tl.constexpr,
    first: tl.constexpr,
    second: tl.constexpr,
):
    offsets = tl.program_id(0) * block + tl.arange(0, block)
    inside = offsets < count
    owner = tl.load(owners + offsets, inside, 0)
    stream = tl.load(streams + owner, inside, 0)
    position = tl.load(next_ + owner, inside, 0).to(tl.uint32, bitcast=True)
    x = (stream ^ (stream >> 32)).to(tl.uint32) + position * golden
    x = (x ^ (x >> 16)) * first
    x = (x ^ (x >> 15)) * second
    x = x ^ (x >> 16)
    token = tl.load(last + owner, inside, 0)
    tl.store(out + offsets, tl.where(x.to(tl.int64) < tl.load(heads), token, -1), inside)


def toss(
    owners: Tensor, last: Tensor, next_: Tensor, streams: Tensor, heads: Tensor
) -> Tensor:
    """Drafts [verified] of rows `owners`: what they drew `last`, or no token. `next_`:
    where; `streams`: 64 bits of each row; `heads` [1]: of 2^32 sides.
    """
    if not on_triton(owners):
        return _reference(owners, last, next_, streams, heads)
    out = torch.empty(len(owners), dtype=torch.int32, device=owners.device)
    _toss[triton.cdiv(len(owners), BLOCK),](
        owners,
        last,
        next_,
        streams,
        heads,
        len(owners),
        out,
        block=BLOCK,
        golden=GOLDEN,
        first=FIRST,
        second=SECOND,
    )
    return out


def _reference(
    owners: Tensor, last: Tensor, next_: Tensor, streams: Tensor, heads: Tensor
) -> Tensor:
    low = SIDES - 1
    index = owners.long()
    stream, position = streams[index], next_[index].long()
    x = ((stream ^ (stream >> 32)) + position * GOLDEN) & low
    x = ((x ^ (x >> 16)) * FIRST) & low
    x = ((x ^ (x >> 15)) * SECOND) & low
    return torch.where((x ^ (x >> 16)) < heads, last[index], NO_TOKEN).int()


class Coined:
    """A backend whose drafts stand by a coin; all else is as it was."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        # Of 2^32 sides, by place of a draft.
        self.heads = torch.zeros(MOST_DRAFTS, dtype=torch.int64, device=inner.device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def set(self, acceptance: float | Sequence[float]) -> None:
        """From now on this share of the drafts is accepted, of those whose predecessors
        were: in all places, or by place, in further ones as in the last that is given.
        Between requests.
        """
        rates = [acceptance] if isinstance(acceptance, float) else [*acceptance]
        rates += rates[-1:] * (len(self.heads) - len(rates))
        self.heads.copy_(torch.tensor([round(rate * SIDES) for rate in rates]))
        if self.heads.is_cuda:
            wait(self.heads.device)  # steps are on another stream

    def make_shaper(self, rows: DeviceRows) -> Any:
        """As the backend's, which is asked once; the rows have the streams."""
        self.streams = rows.stream
        return self.inner.make_shaper(rows)

    def accept_drafts(
        self,
        before: Tensor,
        drafts: Tensor,
        owners: Tensor,
        state: RowTensors,
        place: int,
        next_rows: Tensor,
        positions: Tensor,
        accepted: Tensor,
    ) -> None:
        """As `kernels.verify_drafts.accept_drafts`, of drafts that were tossed."""
        heads = self.heads[place : place + 1]
        tossed = toss(owners, state.last, state.next, self.streams, heads)
        del drafts
        self.inner.accept_drafts(
            before=before,
            drafts=tossed,
            owners=owners,
            state=state,
            place=place,
            next_rows=next_rows,
            positions=positions,
            accepted=accepted,
        )


@contextmanager
def tossing() -> Iterator[list[Coined]]:
    """Executors that are opened meanwhile decide by coins: theirs are noted."""
    executors = list[Coined]()

    def opened(*args: Any, **kwargs: Any) -> Any:
        executors.append(Coined(open_backend(*args, **kwargs)))
        return executors[-1]

    with patch.object(torch_executor, "open_backend", opened):
        yield executors

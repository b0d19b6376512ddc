"""A step's words and rows on the device as a batch that a model runs.

Theory. Packed are, in this order: the last tokens of rows that feed themselves; further
inputs of such rows (drafts, or for a draft model the tokens before), each in a line of
its own; and inputs from history. The first two are decode rows to attention, the others
chunks.
"""

from typing import Final

import torch
from attrs import define, frozen
from torch import Tensor

from minfer.effects.execution.backend import Backend
from minfer.effects.execution.device_rows import DeviceRows, aligned
from minfer.effects.execution.inputs import Drafts, History, Inputs
from minfer.effects.execution.kinds import Kind
from minfer.effects.execution.rejecting import Contest
from minfer.effects.models.batch import Batch, Chunks, Verified
from minfer.kernels.flash import FlashWork

TOKENS: Final = 0  # lines of inputs, as of `History.tokens`
OWNERS: Final = 2


@frozen(eq=False)
class Fed:
    """What a step's tokens are, [tokens] each, int32 unless said otherwise."""

    tokens: Tensor  # ids
    positions: Tensor
    ahead: Tensor  # the positions after them
    slots: Tensor  # int64: where their keys and values go


@frozen(eq=False)
class Step:
    """Who takes part in a step, and with what."""

    selves: Tensor  # [alone] device rows that feed themselves
    further: Tensor | None = None  # [3, more]: their further inputs
    history: History[Tensor] | None = None
    dry: bool = False  # for its own sake: nothing must be left as it was found
    contests: tuple[Contest, ...] = ()  # of drafts among the further inputs, by place

    @property
    def fed(self) -> int:
        """Inputs that are not from history."""
        return len(self.selves) + (0 if self.further is None else self.further.shape[1])

    @property
    def given(self) -> Tensor | None:
        """[3, tokens]: all inputs but those of rows that feed themselves."""
        if self.history is None or self.further is None:
            return self.further if self.history is None else self.history.tokens
        return torch.cat((self.further, self.history.tokens), 1)

    @property
    def rows(self) -> Tensor:
        """[fed] the device rows of all that is not from history."""
        if self.further is None:
            return self.selves
        return torch.cat((self.selves, self.further[OWNERS]))


@define(eq=False)
class Feeder:
    """Makes the batches of one device's rows."""

    backend: Backend
    rows: DeviceRows
    block_size: int

    def fed(self, step: Step) -> Fed:
        """Tokens, positions and slots of a step."""
        rows, selves, given = self.rows, step.selves, step.given
        count = len(selves) + (0 if given is None else given.shape[1])
        # Zeros, as no kernel fills them.
        make = selves.new_zeros if step.dry else selves.new_empty
        tokens, positions, ahead = make((3, aligned(count)))[:, :count].unbind(0)
        slots = make(count, dtype=torch.int64)
        self.backend.gather(
            rows=selves,
            given=given,
            last=rows.last,
            next_=rows.next,
            table=rows.table,
            block_size=self.block_size,
            tokens=tokens,
            positions=positions,
            ahead=ahead,
            slots=slots,
        )
        return Fed(tokens, positions, ahead, slots)

    def batch(
        self,
        step: Step,
        fed: Fed,
        sample: Tensor | None,
        chunks: Chunks | None,
        *,
        splits: int,
        fused: bool = False,
        verified: Verified | None = None,
    ) -> Batch:
        """What a model runs, given a step's inputs; `sample` and `verified` are as in
        `Batch`.
        """
        return Batch(
            tokens=fed.tokens,
            positions=fed.positions,
            slots=fed.slots,
            sample=sample,
            table=self.rows.table,
            rows=step.rows,
            contexts=fed.ahead[: step.fed],
            chunks=chunks,
            splits=splits,
            fused=fused,
            verified=verified,
        )


def sampled(kind: Kind, inputs: Inputs[Tensor]) -> Tensor | None:
    """Which inputs' logits are wanted: those that are drawn from without drafts, then
    drafts; None: all, in order.
    """
    if inputs.history is None:
        return None
    drawn = inputs.history.draws[1]
    if not kind.drafts:
        return drawn
    drafts = torch.arange(kind.alone, kind.fed, dtype=torch.int32, device=drawn.device)
    return torch.cat((drawn, drafts))


def verified_of(kind: Kind, drafts: Drafts[Tensor], fed: Fed) -> Verified:
    """Whose a step's drafts are, given its inputs."""
    count = kind.verified
    return Verified(
        alone=kind.alone,
        starts=fed.positions[:count],
        counts=drafts.counts + 1,
        firsts=torch.arange(count, dtype=torch.int32, device=drafts.counts.device),
        most=1 + kind.drafts,
    )


def chunks_of(
    kind: Kind, history: History[Tensor], flash: FlashWork | None = None
) -> Chunks:
    """The chunks of history."""
    rows, starts, counts, offsets = history.chunks
    return Chunks(rows, starts, counts, offsets, kind.longest, flash)

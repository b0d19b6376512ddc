"""Builds a model's batch from a step's words and the rows on the device.

Theory. The packed order is: the last tokens of decode rows; further inputs of such rows
(drafts, or for a draft model the tokens before the last), each in a line of its own; and
prefill tokens. The first two are decode rows to attention, the others chunks.
"""

from typing import Final

import torch
from attrs import define, frozen
from torch import Tensor

from minfer.effects.execution.device.backend import Backend
from minfer.effects.execution.device.device_rows import DeviceRows, aligned
from minfer.effects.execution.device.step_shape import StepShape
from minfer.effects.execution.packing.inputs import Drafts, History, Inputs
from minfer.effects.execution.running.rejection_sampling import Contest
from minfer.effects.models.batch import Batch, Chunks, Verified
from minfer.kernels.flash import FlashWork

TOKENS: Final = 0  # lines of inputs, as of `History.tokens`
OWNERS: Final = 2


@frozen(eq=False)
class Fed:
    """A step's input tokens, [tokens] each, int32 unless noted."""

    tokens: Tensor  # ids
    positions: Tensor
    ahead: Tensor  # the positions after them
    slots: Tensor  # int64: where their keys and values go


@frozen(eq=False)
class Step:
    """The rows and inputs of a step."""

    decoding: Tensor  # [alone] device rows that decode
    further: Tensor | None = None  # [3, more]: their further inputs
    history: History[Tensor] | None = None
    dry: bool = False  # a dummy step: buffers are zeroed, as no kernel fills them
    contests: tuple[Contest, ...] = ()  # places of drafts among the further inputs

    @property
    def decode_inputs(self) -> int:
        """Inputs that are not prefill tokens."""
        return len(self.decoding) + (0 if self.further is None else self.further.shape[1])

    @property
    def given(self) -> Tensor | None:
        """[3, tokens]: all inputs but the last tokens of decode rows."""
        if self.history is None or self.further is None:
            return self.further if self.history is None else self.history.tokens
        return torch.cat((self.further, self.history.tokens), 1)

    @property
    def rows(self) -> Tensor:
        """[fed] the device rows of all inputs that are not prefill tokens."""
        if self.further is None:
            return self.decoding
        return torch.cat((self.decoding, self.further[OWNERS]))


@define(eq=False)
class Feeder:
    """Builds the batches of one device's rows."""

    backend: Backend
    rows: DeviceRows
    block_size: int

    def decode_inputs(self, step: Step) -> Fed:
        """Gather tokens, positions and slots of a step."""
        rows, decoding, given = self.rows, step.decoding, step.given
        count = len(decoding) + (0 if given is None else given.shape[1])
        # Zeros for a dummy step, as no kernel fills them.
        make = decoding.new_zeros if step.dry else decoding.new_empty
        tokens, positions, ahead = make((3, aligned(count)))[:, :count].unbind(0)
        slots = make(count, dtype=torch.int64)
        self.backend.gather(
            rows=decoding,
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
        decode_inputs: Fed,
        sample: Tensor | None,
        chunks: Chunks | None,
        *,
        splits: int,
        fused: bool = False,
        verified: Verified | None = None,
    ) -> Batch:
        """Returns the batch of a step with these inputs; `sample` and `verified` are as
        in `Batch`.
        """
        return Batch(
            tokens=decode_inputs.tokens,
            positions=decode_inputs.positions,
            slots=decode_inputs.slots,
            sample=sample,
            table=self.rows.table,
            rows=step.rows,
            contexts=decode_inputs.ahead[: step.decode_inputs],
            chunks=chunks,
            splits=splits,
            fused=fused,
            verified=verified,
        )


def sampled(shape: StepShape, inputs: Inputs[Tensor]) -> Tensor | None:
    """Returns the inputs whose logits are needed: those sampled from, then drafts; None:
    all, in order.
    """
    if inputs.history is None:
        return None
    drawn = inputs.history.draws[1]
    if not shape.drafts:
        return drawn
    drafts = torch.arange(
        shape.decode_rows, shape.decode_inputs, dtype=torch.int32, device=drawn.device
    )
    return torch.cat((drawn, drafts))


def verified_of(shape: StepShape, drafts: Drafts[Tensor], decode_inputs: Fed) -> Verified:
    """Returns the layout of a step's drafts, given its inputs."""
    count = shape.verified
    return Verified(
        decode_rows=shape.decode_rows,
        starts=decode_inputs.positions[:count],
        counts=drafts.counts + 1,
        firsts=torch.arange(count, dtype=torch.int32, device=drafts.counts.device),
        most=1 + shape.drafts,
    )


def chunks_of(
    shape: StepShape, history: History[Tensor], flash: FlashWork | None = None
) -> Chunks:
    """Returns the prefill chunks."""
    rows, starts, counts, offsets = history.chunks
    return Chunks(rows, starts, counts, offsets, shape.longest, flash)

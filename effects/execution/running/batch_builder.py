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
from minfer.effects.execution.packing.inputs import DraftWords, ForwardWords, PrefillWords
from minfer.effects.models.architecture.batch import (
    Batch,
    PrefillChunks,
    VerifiedRows,
    drafted_rows,
    state_chunks,
)
from minfer.effects.models.architecture.pending_states import PendingStates
from minfer.kernels.dequantized_work import DequantizedWork
from minfer.kernels.expanded_work import ExpandedWork
from minfer.kernels.flash import FlashWork
from minfer.kernels.row_state import StepInputs
from minfer.kernels.state_work import StateWork

TOKENS: Final = 0  # lines of inputs, as of `PrefillWords.tokens`
OWNER_LINE: Final = 2


@frozen(eq=False)
class StepRows:
    """The rows and inputs of a step."""

    decode_rows: Tensor  # [decode rows] device rows
    extra_inputs: Tensor | None = None  # [3, more]: their further inputs
    prefill: PrefillWords[Tensor] | None = None
    dummy: bool = False  # a dummy step: buffers are zeroed, as no kernel fills them

    @property
    def decode_inputs(self) -> int:
        """Inputs that are not prefill tokens."""
        num_extra = 0 if self.extra_inputs is None else self.extra_inputs.shape[1]
        return len(self.decode_rows) + num_extra

    @property
    def extra(self) -> Tensor | None:
        """[3, tokens]: all inputs but the last tokens of decode rows."""
        if self.prefill is None or self.extra_inputs is None:
            return self.extra_inputs if self.prefill is None else self.prefill.tokens
        return torch.cat((self.extra_inputs, self.prefill.tokens), 1)

    @property
    def rows(self) -> Tensor:
        """[fed] the device rows of all inputs that are not prefill tokens."""
        if self.extra_inputs is None:
            return self.decode_rows
        return torch.cat((self.decode_rows, self.extra_inputs[OWNER_LINE]))


@define(eq=False)
class BatchBuilder:
    """Builds the batches of one device's rows."""

    backend: Backend
    rows: DeviceRows
    block_size: int
    # The first slot that only padding writes, which is sent to no expert; 0: there are no
    # experts.
    padding_from: int = 0

    def decode_inputs(self, step: StepRows) -> StepInputs:
        """Gather tokens, positions and slots of a step."""
        decode_rows, extra = step.decode_rows, step.extra
        count = len(decode_rows) + (0 if extra is None else extra.shape[1])
        # Zeros for a dummy step, as no kernel fills them.
        make = decode_rows.new_zeros if step.dummy else decode_rows.new_empty
        tokens, positions, ahead = make((3, aligned(count)))[:, :count].unbind(0)
        slots = make((len(self.rows.table), count), dtype=torch.int64)
        inputs = StepInputs(tokens, positions, ahead, slots)
        self.backend.gather(decode_rows, extra, self.rows.state, self.block_size, inputs)
        return inputs

    def batch(
        self,
        step: StepRows,
        decode_inputs: StepInputs,
        sample: Tensor | None,
        chunks: PrefillChunks | None,
        *,
        splits: tuple[int, ...],
        fused: bool = False,
        verified: VerifiedRows | None = None,
        adapters: bool = False,
    ) -> Batch:
        """Returns the batch of a step with these inputs; `sample` and `verified` are as
        in `Batch`. `adapters`: its rows' adapters change the products.
        """
        states, pending = self._states(step, decode_inputs, chunks, verified), None
        if states is not None and states.drafted is not None:
            pending = PendingStates(states, step.decode_inputs)
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
            real=self._real_inputs(decode_inputs),
            states=states,
            pending=pending,
            adapter_slots=self._adapter_slots(step) if adapters else None,
        )

    def _states(
        self,
        step: StepRows,
        decode_inputs: StepInputs,
        chunks: PrefillChunks | None,
        verified: VerifiedRows | None,
    ) -> StateWork | None:
        """Returns the work of recurrent layers, if there are any."""
        if not self.rows.state_pages:
            return None
        decode_rows = step.decode_rows
        first = 0 if verified is None else len(verified.counts)
        work = StateWork(
            table=self.rows.state_table,
            rows=decode_rows[first:],
            starts=decode_inputs.positions[first : len(decode_rows)],
            chunks=None if chunks is None else state_chunks(chunks),
            drafted=None if verified is None else drafted_rows(verified, decode_rows),
            first_token=first,
        )
        inside = None if step.prefill is None else step.prefill.inside
        if inside is None:
            return work
        numbers, counts = inside.unbind(0)
        return work.keeping_inside(numbers, counts, self.rows.saved_offset)

    def _adapter_slots(self, step: StepRows) -> Tensor | None:
        """Returns the slot of each input's adapter [tokens]."""
        if self.rows.adapter_slots is None:
            return None
        owners = step.rows
        if step.prefill is not None:
            owners = torch.cat((owners, step.prefill.tokens[OWNER_LINE]))
        return self.rows.adapter_slots.index_select(0, owners)

    def _real_inputs(self, decode_inputs: StepInputs) -> Tensor | None:
        """Returns which inputs are not padding, if there are experts."""
        if not self.padding_from:
            return None
        return decode_inputs.slots[0] < self.padding_from


def logit_inputs(shape: StepShape, inputs: ForwardWords[Tensor]) -> Tensor | None:
    """Returns the inputs whose logits are needed: those sampled from, then drafts; None:
    all, in order.
    """
    if inputs.prefill is None:
        return None
    drawn = inputs.prefill.draws[1]
    if not shape.drafts:
        return drawn
    drafts = torch.arange(
        shape.decode_rows, shape.decode_inputs, dtype=torch.int32, device=drawn.device
    )
    return torch.cat((drawn, drafts))


def verified_of(
    shape: StepShape, drafts: DraftWords[Tensor], decode_inputs: StepInputs
) -> VerifiedRows:
    """Returns the layout of a step's drafts, given its inputs."""
    count = shape.verified
    return VerifiedRows(
        decode_rows=shape.decode_rows,
        starts=decode_inputs.positions[:count],
        counts=drafts.counts + 1,
        firsts=torch.arange(count, dtype=torch.int32, device=drafts.counts.device),
        max_count=1 + shape.drafts,
    )


def chunks_of(
    shape: StepShape,
    prefill: PrefillWords[Tensor],
    flash: tuple[FlashWork | None, ...] = (),
    expanded: ExpandedWork | None = None,
    dequantized: DequantizedWork | None = None,
) -> PrefillChunks:
    """Returns the prefill chunks."""
    rows, starts, counts, offsets = prefill.chunks
    return PrefillChunks(
        rows, starts, counts, offsets, shape.longest, flash, expanded, dequantized
    )

"""A draft head behind its target: one more layer, which reads the target's hidden states.

Theory. A head (MTP, EAGLE-3) computes the token at position i + 1 from token i and the
target's hidden state at position i - 1, and attends to its own keys of earlier pairs.
Its layer is one more layer of the target's cache, so block tables, prefix hits,
preemption, tiers and the memory plan carry its keys with those of the target. Slot i has
the keys of (hidden state i - 1, token i): so they depend on tokens 0 to i alone, as block
keys promise. (A head's own positions are one smaller; rotated scores depend on
differences only.)

A step goes on in this order:

    draft    the head runs as many times as there are places. The first time it takes each
             row's last token, with the hidden state that the row kept; then its own last
             token and its own output.
    verify   the target runs, and its hidden states are noted (`LayerStates`).
    store    the head's keys of all tokens of the step are written from the target's
             hidden states: combine, norm, and the products of keys and values, without
             attention and feed-forward, which a head of one layer needs for drafts
             only. So there are no gaps, whether a step has drafts or not, and the keys
             that drafting wrote from the head's own output are replaced.
    keep     each row keeps the hidden state before its next token: of its last input, or
             of its last accepted draft.

Where the hidden state before a token is missing (the first token of a sequence, or behind
a cached prefix), it is zeros. That changes how many drafts are accepted, and no token.
"""

import torch
from attrs import define, frozen
from torch import Tensor

from minfer.effects.execution.device.backend import Cache
from minfer.effects.execution.device.routes import Routes
from minfer.effects.execution.device.step_shape import StepShape
from minfer.effects.execution.packing.inputs import DraftWords
from minfer.effects.execution.running.batch_builder import BatchBuilder, StepRows
from minfer.effects.execution.running.drafter import propose_by_place
from minfer.effects.execution.running.head_model import HeadModel
from minfer.effects.execution.running.rejection_sampling import DraftProposal
from minfer.effects.execution.running.sampler import Sampler
from minfer.effects.models.architecture.batch import Batch, PrefillChunks
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.dtypes import torch_dtype


@frozen(eq=False)
class PendingHidden:
    """The hidden states of a step whose accepted drafts are not known yet."""

    row_states: Tensor  # [device rows, hidden]: where rows keep theirs
    rows: Tensor  # [verified] device rows
    states: Tensor  # [inputs, hidden]
    first_draft: int  # the first input that is a draft

    def accept(self, num_accepted: Tensor) -> None:
        """Keep the state of each row's last token, or of its last accepted draft."""
        count = len(self.rows)
        inputs = torch.arange(count, dtype=num_accepted.dtype, device=self.rows.device)
        drafts = inputs + (self.first_draft + (num_accepted - 1) * count)
        last_inputs = inputs.where(num_accepted == 0, drafts)
        states = self.states.index_select(0, last_inputs)
        self.row_states.index_copy_(0, self.rows.long(), states)


@define(eq=False)
class DraftHead:
    """Drafts of a head for the rows of one device."""

    spec: ModelSpec  # the target's, with the head's layer
    model: HeadModel
    cache: Cache  # the target's
    batch_builder: BatchBuilder
    routes: Routes
    row_states: Tensor  # [device rows, hidden] before each row's next token

    @classmethod
    def open(
        cls, model: HeadModel, cache: Cache, batch_builder: BatchBuilder
    ) -> "DraftHead":
        """Build beside the target's cache. Raises torch.OutOfMemoryError."""
        spec, device = model.target, batch_builder.backend.device
        lines = batch_builder.rows.scratch + 1
        row_states = torch.zeros(
            lines, model.head.hidden_size, dtype=torch_dtype(spec.dtype), device=device
        )
        routes = batch_builder.backend.routes
        cached = spec.with_head_layer()
        return cls(cached, model, cache, batch_builder, routes, row_states)

    @property
    def caches(self) -> tuple[Cache, ...]:
        """None: its keys are in the target's."""
        return ()

    @property
    def layers(self) -> tuple[int, ...]:
        """The target's layers whose input it reads."""
        return self.model.head.hidden_layers

    def splits(self, shape: StepShape, context: int) -> tuple[int, ...]:
        """Returns the splits of contexts in steps of a shape."""
        return self.routes.splits(max(1, shape.verified), context)

    def open_rows(self, rows: list[int]) -> None:
        """Forget what earlier owners of rows kept."""
        index = torch.tensor(rows, pin_memory=self.row_states.is_cuda)
        index = index.to(self.row_states.device, non_blocking=True)
        self.row_states.index_fill_(0, index, 0)

    def propose(
        self,
        shape: StepShape,
        step: StepRows,
        drafts: DraftWords[Tensor],
        sampler: Sampler,
    ) -> list[DraftProposal]:
        """Draft for `verified` rows, place by place."""
        rows = step.decode_rows[: shape.verified]
        hidden = self.row_states.index_select(0, rows)

        def logits_of(place: int, inputs: StepRows) -> Tensor:
            del place
            nonlocal hidden
            batch = self.batch_builder.batch(
                inputs,
                self.batch_builder.decode_inputs(inputs),
                sample=None,
                chunks=None,
                splits=shape.draft_splits,
            )
            hidden, logits = self.model.draft(batch, self.cache, hidden)
            return logits

        device_rows = self.batch_builder.rows
        return propose_by_place(device_rows, shape, step, drafts, sampler, logits_of)

    def read_target(
        self, shape: StepShape, step: StepRows, batch: Batch
    ) -> PendingHidden | None:
        """Write the keys of all tokens of a step, and keep the hidden states of its
        rows; of those with drafts, once `PendingHidden.accept` is called.
        """
        if batch.layer_states is None or batch.layer_states.states is None:
            raise AssertionError("the target has noted no hidden states")
        states = self.model.project(batch, self.cache, batch.layer_states.states)
        self.model.store(
            batch, self.cache, self._states_before(shape, step, batch, states)
        )
        verified, decode_rows = shape.verified, step.decode_rows
        self._keep(decode_rows[verified:], states[verified : len(decode_rows)])
        if (chunks := batch.chunks) is not None:
            last = (chunks.offsets + chunks.counts - 1).clamp(min=0)
            self._keep(chunks.rows, states.index_select(0, last))
        if not shape.drafts:
            return None
        rows = decode_rows[:verified]
        return PendingHidden(self.row_states, rows, states, len(decode_rows))

    def _states_before(
        self, shape: StepShape, step: StepRows, batch: Batch, states: Tensor
    ) -> Tensor:
        """Returns the hidden state before each input [inputs, hidden]: what its row kept,
        or that of the input before it.
        """
        kept = self.row_states.index_select(0, step.decode_rows)
        if not shape.drafts and batch.chunks is None:
            return kept
        num_inputs, num_rows = len(states), len(step.decode_rows)
        before = states.new_empty(num_inputs + 1, states.shape[1])
        before[:num_rows] = kept
        if shape.drafts:
            count, end = shape.verified, shape.decode_inputs
            before[num_rows : num_rows + count] = states[:count]
            before[num_rows + count : end] = states[num_rows : end - count]
        if batch.chunks is not None:
            first = shape.decode_inputs
            before[first + 1 : num_inputs] = states[first : num_inputs - 1]
            self._write_first_states(batch.chunks, before)
        return before[:num_inputs]

    def _write_first_states(self, chunks: PrefillChunks, before: Tensor) -> None:
        """Write what rows kept before the first token of each chunk; of padding, to the
        last line.
        """
        first = chunks.offsets.where(chunks.counts > 0, len(before) - 1)
        kept = self.row_states.index_select(0, chunks.rows)
        before.index_copy_(0, first.long(), kept)

    def _keep(self, rows: Tensor, states: Tensor) -> None:
        self.row_states.index_copy_(0, rows.long(), states)

"""From logits to tokens: shaping, sampling, advancing rows, log-probabilities.

Sampling values of rows are in `DeviceRows`; noise is a function of these and of the
position (`minfer.sampling.reference_sampler`). Where at least one row of a step needs its
logits changed (`minfer.sampling.logits`), all logits of the step become float32: so the
sampling kernels do not depend on it, and other steps launch nothing more.
Log-probabilities are the model's own: neither temperature nor filters nor masks nor
penalties change them. All is launched in order and can be captured, also deferred draws
(`deferred_sampling.py`).

Of several ranks that share a model, each has a part of the logits. In steps whose rows
only draw, on GPUs, ranks exchange the best tokens of their parts (`kernels/sample.py`);
in others, logits are gathered first.
"""

import torch
from torch import Tensor

from minfer.effects.execution.device.backend import Backend, DrawnTokens
from minfer.effects.execution.device.device_rows import DeviceRows, SamplingNeeds
from minfer.effects.execution.running.device_masks import DeviceMasks
from minfer.effects.execution.running.rejection_sampling import (
    DraftProposal,
    PlaceDrafts,
    rejection_sample,
)
from minfer.effects.models.ranks import SINGLE_RANK, Communicator, whole_logits
from minfer.records.plan import NewRow
from minfer.sampling.params import MAX_LOGPROBS


class Sampler:
    """Samples for the rows of one device."""

    def __init__(
        self,
        backend: Backend,
        rows: DeviceRows,
        draws: int,
        lines: int = 0,
        *,
        keeps_previous: bool = False,
        ranks: Communicator = SINGLE_RANK,
    ) -> None:
        """`draws` is the most in a step without drafts, `lines` the most lines of output,
        if more. `keeps_previous`: rows also keep the token before their last. `ranks`
        have a part of the logits each.
        """
        self.ranks = ranks
        self.backend = backend
        self.rows = rows
        self.keeps_previous = keeps_previous
        self.shaper = backend.make_shaper(rows)
        device = backend.device
        lines = max(lines, draws)
        # [lines]: tokens; -1 where logits are not finite
        self.out = torch.zeros(lines, dtype=torch.int32, device=device)
        # as `kernels.logprobs` writes them
        self.scores = torch.zeros(
            lines, 2, 1 + MAX_LOGPROBS, dtype=torch.int32, device=device
        )
        # [device rows, columns]: this rank's logits of rows with deferred sampling, once
        # there are any
        self.kept_logits: Tensor | None = None
        self.masks = DeviceMasks(draws, rows.vocab, device)

    def open(self, row: int, opened: NewRow) -> None:
        """Reset a row for a new owner."""
        self.rows.open(row, opened)
        self.shaper.open(row, opened)

    # --- pipeline stages: see stage_sampler.py ------------------------------------------

    def finish(self, step: int, lines: int) -> None:
        """Note that a forward of a step has been launched, whose tokens are in the first
        lines.
        """

    def receive(self, step: int) -> None:
        """Receive the tokens of forwards up to this step, in a stage before the last."""

    # --- sampling -----------------------------------------------------------------------

    def sample(
        self,
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        needs: SamplingNeeds,
        first_line: int = 0,
        drafts: PlaceDrafts | None = None,
    ) -> None:
        """Sample for the device rows `rows` [draws] from `logits` [draws, vocab], or this
        rank's part of them, the tokens at `positions`, and advance the rows. Results go
        to the lines of `out` and `scores` from `first_line` on. `drafts`: drafts of the
        first rows, which coins accept or reject.
        """
        needs_logits = (
            needs.filtered or needs.scored or needs.shaped or drafts is not None
        )
        if not needs_logits and not self.ranks.rank_info.has_whole_matrices:
            drawn = self.backend.sample_divided(
                logits, rows, self.rows, positions, self.ranks
            )
            if drawn is not None:
                self._advance(drawn, rows, positions, first_line)
                return
        logits = self._whole_logits(logits)
        self._draw(logits, logits, rows, positions, needs, first_line, drafts)

    def propose(
        self, logits: Tensor, rows: Tensor, positions: Tensor, needs: SamplingNeeds
    ) -> DraftProposal:
        """Returns the tokens that these rows [draws] would sample, without advancing the
        rows; with rejection sampling, by independent noise. Earlier drafts of a step do
        not count as output.
        """
        device_rows = self.rows
        if needs.shaped:
            logits = self.shaper.shape(logits, rows, positions)
        drawn = self.backend.sample(
            logits,
            rows,
            device_rows,
            positions,
            filtered=needs.filtered,
            streams=device_rows.draft_stream,
        )
        return DraftProposal(drawn.tokens, None if device_rows.coins is None else logits)

    def keep(self, logits: Tensor, rows: Tensor) -> None:
        """Keep logits [draws, vocab], or this rank's part, of device rows [draws] until
        `sample_kept`, but for the scratch row.
        """
        if (
            self.kept_logits is None
        ):  # never while a graph is captured: a dummy step runs before
            self.kept_logits = logits.new_zeros(self.rows.scratch + 1, logits.shape[1])
        self.backend.keep(logits, rows, self.kept_logits, self.rows.scratch)

    def sample_kept(self, rows: Tensor, positions: Tensor, needs: SamplingNeeds) -> None:
        """`sample` from the kept logits of these rows; only tokens that their masks
        allow.
        """
        if self.kept_logits is None:
            raise AssertionError("no logits have been kept")
        kept_logits, lines = self.kept_logits, rows
        if not self.ranks.rank_info.has_whole_matrices:
            kept_logits = self._whole_logits(kept_logits.index_select(0, rows))
            lines = torch.arange(len(rows), dtype=rows.dtype, device=rows.device)
        logits = self.backend.hide(kept_logits, lines, self.masks.lines[: len(rows)])
        unmasked = kept_logits.index_select(0, lines) if needs.scored else logits
        self._draw(logits, unmasked, rows, positions, needs)

    def _whole_logits(self, logits_part: Tensor) -> Tensor:
        return whole_logits(logits_part, self.rows.vocab, self.ranks)

    def _draw(
        self,
        logits: Tensor,
        unmasked: Tensor,
        rows: Tensor,
        positions: Tensor,
        needs: SamplingNeeds,
        first_line: int = 0,
        drafts: PlaceDrafts | None = None,
    ) -> None:
        device_rows, filtered = self.rows, needs.filtered
        if needs.shaped:
            logits = self.shaper.shape(logits, rows, positions)
        drawn = self.backend.sample(
            logits, rows, device_rows, positions, filtered=filtered
        )
        if drafts is not None:
            drawn = rejection_sample(
                drawn, drafts, logits, rows, positions, device_rows, filtered=filtered
            )
        if needs.shaped:
            self.shaper.count(rows, positions, drawn)
        self._advance(drawn, rows, positions, first_line)
        if needs.scored:
            scores = self.scores[first_line:]
            self.backend.logprobs(
                unmasked, drawn.tokens, rows, device_rows.requested_logprobs, scores
            )

    def _advance(
        self, drawn: DrawnTokens, rows: Tensor, positions: Tensor, first_line: int
    ) -> None:
        """Store sampled tokens in the rows, and in the lines of `out` from `first_line`
        on.
        """
        device_rows = self.rows
        if self.keeps_previous:
            before = device_rows.last.index_select(0, rows)
            device_rows.previous.index_copy_(0, rows.long(), before)
        self.backend.advance(
            rows=rows,
            positions=positions,
            drawn=drawn.tokens,
            broken=drawn.broken,
            state=device_rows.state,
            out=self.out[first_line:],
        )

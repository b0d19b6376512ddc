"""From logits to tokens: shaped, drawn, kept as the rows' last ones, with
log-probabilities.

What a row's sampling values are lies in `DeviceRows`; noise is a function of them and of
the position (`minfer.sample`). Where a row of a step wants its logits changed
(`minfer.shape`), all of that step's are float32 from then on: so nothing that draws need
know of it, and steps in which nobody wants it launch nothing more. Log-probabilities are
the model's own: neither temperature nor filters nor masks nor penalties change them. All
of it is launched in order and can be captured; so can draws that come late
(`late_draws.py`).
"""

import torch
from torch import Tensor

from minfer.effects.execution.backend import Backend
from minfer.effects.execution.device_rows import DeviceRows, Wants
from minfer.effects.execution.masks import Masks
from minfer.effects.execution.rejecting import Contest, Guess, contested
from minfer.params import MAX_LOGPROBS
from minfer.plan import Open


class Sampler:
    """Draws for the rows of one device."""

    def __init__(
        self,
        backend: Backend,
        rows: DeviceRows,
        draws: int,
        lines: int = 0,
        *,
        remembers: bool = False,
    ) -> None:
        """`draws` is how many there can be in a step but for drafts, `lines` how many
        come back, if more. `remembers`: rows keep the token before their last, too.
        """
        self.backend = backend
        self.rows = rows
        self.remembers = remembers
        self.shaper = backend.make_shaper(rows)
        device = backend.device
        lines = max(lines, draws)
        # [lines]: tokens; -1 where logits are not finite
        self.out = torch.zeros(lines, dtype=torch.int32, device=device)
        # as `kernels.logprobs` writes them
        self.scores = torch.zeros(
            lines, 2, 1 + MAX_LOGPROBS, dtype=torch.int32, device=device
        )
        # [device rows, vocab]: logits of rows that are sampled apart, once there are any
        self.kept: Tensor | None = None
        self.masks = Masks(draws, rows.vocab, device)

    def open(self, row: int, opened: Open) -> None:
        """A row is taken over."""
        self.rows.open(row, opened)
        self.shaper.open(row, opened)

    def sample(
        self,
        logits: Tensor,
        who: Tensor,
        positions: Tensor,
        wants: Wants,
        at: int = 0,
        contest: Contest | None = None,
    ) -> None:
        """Draw for the device rows `who` [draws] from `logits` [draws, vocab], the tokens
        at `positions`, and let the rows advance. What is drawn goes to the lines of `out`
        and `scores` from `at` on. `contest`: drafts of the first of them, which coins let
        stand.
        """
        self._draw(logits, logits, who, positions, wants, at, contest)

    def guess(
        self, logits: Tensor, who: Tensor, positions: Tensor, wants: Wants
    ) -> Guess:
        """What would be drawn for these rows [draws], which stay where they are; where
        coins decide, by noise that is independent of theirs. Tokens that are guessed
        before others do not count as output.
        """
        rows, streams = self.rows, self.rows.draft_stream
        if wants.shaped:
            logits = self.shaper.shape(logits, who, positions)
        drawn = self.backend.sample(
            logits, who, rows, positions, filtered=wants.filtered, streams=streams
        )
        return Guess(drawn.tokens, None if rows.coins is None else logits)

    def keep(self, logits: Tensor, rows: Tensor) -> None:
        """Keep logits [draws, vocab] for device rows [draws] until `sample_kept`; not for
        the scratch row.
        """
        if self.kept is None:  # never while a graph is captured: that step ran before
            self.kept = logits.new_zeros(self.rows.scratch + 1, logits.shape[1])
        self.backend.keep(logits, rows, self.kept, self.rows.scratch)

    def sample_kept(self, who: Tensor, positions: Tensor, wants: Wants) -> None:
        """`sample`, from what was kept for these rows; only tokens that their masks
        allow.
        """
        if self.kept is None:
            raise AssertionError("no logits have been kept")
        logits = self.backend.hide(self.kept, who, self.masks.lines[: len(who)])
        plain = self.kept.index_select(0, who) if wants.scored else logits
        self._draw(logits, plain, who, positions, wants)

    def _draw(
        self,
        logits: Tensor,
        unmasked: Tensor,
        who: Tensor,
        positions: Tensor,
        wants: Wants,
        at: int = 0,
        contest: Contest | None = None,
    ) -> None:
        rows, filtered = self.rows, wants.filtered
        if wants.shaped:
            logits = self.shaper.shape(logits, who, positions)
        drawn = self.backend.sample(logits, who, rows, positions, filtered=filtered)
        if contest is not None:
            drawn = contested(
                drawn, contest, logits, who, positions, rows, filtered=filtered
            )
        if wants.shaped:
            self.shaper.count(who, positions, drawn)
        if self.remembers:
            before = rows.last.index_select(0, who)
            rows.previous.index_copy_(0, who.long(), before)
        self.backend.advance(
            rows=who,
            positions=positions,
            drawn=drawn.tokens,
            broken=drawn.broken,
            last=rows.last,
            next_=rows.next,
            scratch=rows.scratch,
            out=self.out[at:],
        )
        if wants.scored:
            scores = self.scores[at:]
            self.backend.logprobs(unmasked, drawn.tokens, who, rows.asked, scores)

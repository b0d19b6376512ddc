"""Samplers of pipeline stages: those before the last take its tokens.

Their forwards end without logits. Which rows would be sampled is noted, and the tokens
are taken before the next forward of the same micro-batch, which needs them: meanwhile
this stage computes others. A graph of a step notes its rows where all graphs do, and what
it noted is copied after it; tokens are sent and taken outside of graphs.
"""

from collections import deque

import torch
from attrs import frozen
from torch import Tensor

from minfer.effects.execution.device.backend import Backend
from minfer.effects.execution.device.device_rows import DeviceRows, SamplingNeeds, aligned
from minfer.effects.execution.running.rejection_sampling import PlaceDrafts
from minfer.effects.execution.running.sampler import Sampler
from minfer.effects.models.ranks import Communicator


@frozen(eq=False)
class NotedForward:
    """A forward whose tokens have not come yet."""

    step: int
    draws: Tensor  # [2, lines]: rows to be advanced, and their positions


class LastStageSampler(Sampler):
    """Sends all tokens to the stages before."""

    def finish(self, step: int, lines: int) -> None:
        """See `Sampler.finish`."""
        del step
        if lines:
            self.ranks.send_tokens(self.out[:lines].clone())


class EarlierStageSampler(Sampler):
    """Takes tokens instead of sampling."""

    draws: Tensor  # [2, lines]: rows and positions of the forward that ran last
    forwards: deque[NotedForward]

    def keep(self, logits: Tensor, rows: Tensor) -> None:
        """There are no logits here."""

    def sample(
        self,
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        needs: SamplingNeeds,
        first_line: int = 0,
        drafts: PlaceDrafts | None = None,
    ) -> None:
        """See `Sampler.sample`."""
        self._draw(logits, logits, rows, positions, needs, first_line, drafts)

    def sample_kept(self, rows: Tensor, positions: Tensor, needs: SamplingNeeds) -> None:
        """See `Sampler.sample_kept`."""
        self._draw(self.out, self.out, rows, positions, needs)

    def _draw(
        self,
        logits: Tensor,  # noqa: ARG002  # there are none
        unmasked: Tensor,  # noqa: ARG002  # likewise
        rows: Tensor,
        positions: Tensor,
        needs: SamplingNeeds,  # noqa: ARG002  # the last stage does all that
        first_line: int = 0,  # noqa: ARG002  # more than one draw is of drafts, as below
        drafts: PlaceDrafts | None = None,  # noqa: ARG002  # refused with stages
    ) -> None:
        self.draws[0, : len(rows)].copy_(rows)
        self.draws[1, : len(rows)].copy_(positions)

    def finish(self, step: int, lines: int) -> None:
        """See `Sampler.finish`."""
        if lines:
            draws = self.draws[:, : aligned(lines)].clone()[:, :lines]
            self.forwards.append(NotedForward(step, draws))

    def receive(self, step: int) -> None:
        """See `Sampler.receive`."""
        while self.forwards and self.forwards[0].step <= step:
            rows, positions = self.forwards.popleft().draws.unbind(0)
            tokens = self.ranks.receive_tokens(len(rows))
            self.backend.advance(
                rows=rows,
                positions=positions,
                drawn=tokens.clamp(min=0),
                broken=(tokens < 0).to(torch.int32),
                state=self.rows.state,
                # Not `out`, which the next step's results are read from: rank 0 reports
                # that this step has failed.
                out=tokens,
            )


def make_sampler(
    ranks: Communicator,
    backend: Backend,
    rows: DeviceRows,
    draws: int,
    lines: int,
    *,
    keeps_previous: bool,
) -> Sampler:
    """Returns the sampler of a rank; the rest is `Sampler`'s."""
    if ranks.rank_info.parallel.pipeline == 1:
        return Sampler(
            backend, rows, draws, lines, keeps_previous=keeps_previous, ranks=ranks
        )
    if ranks.rank_info.is_last_stage:
        return LastStageSampler(backend, rows, draws, lines, ranks=ranks)
    earlier = EarlierStageSampler(backend, rows, draws, lines, ranks=ranks)
    earlier.forwards = deque()
    size = aligned(len(earlier.out))
    earlier.draws = torch.zeros(2, size, dtype=torch.int32, device=backend.device)
    return earlier

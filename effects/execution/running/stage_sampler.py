"""Samplers of pipeline stages: those before the last take its tokens.

Their forwards end without logits. What would be sampled is noted, and the tokens are
taken before the next forward of the same micro-batch, which needs them: meanwhile this
stage computes others.
"""

from collections import deque

import torch
from attrs import define, field, frozen
from torch import Tensor

from minfer.effects.execution.device.backend import Backend
from minfer.effects.execution.device.device_rows import DeviceRows, Wants
from minfer.effects.execution.running.rejection_sampling import PlaceDrafts
from minfer.effects.execution.running.sampler import Sampler
from minfer.effects.models.ranks import Ranks


@frozen(eq=False)
class NotedDraws:
    """Rows to be advanced."""

    rows: Tensor
    positions: Tensor
    at: int  # the first line of the tokens


@frozen(eq=False)
class NotedForward:
    """A forward whose tokens have not come yet."""

    step: int
    lines: int
    draws: list[NotedDraws]


@define(eq=False)
class Noted:
    """What a stage has noted."""

    draws: list[NotedDraws] = field(factory=list)  # of the forward that is being run
    forwards: deque[NotedForward] = field(factory=deque)


class LastStageSampler(Sampler):
    """Sends all tokens to the stages before."""

    ranks: Ranks

    def finish(self, step: int, lines: int) -> None:
        """See `Sampler.finish`."""
        del step
        if lines:
            self.ranks.send_tokens(self.out[:lines].clone())


class EarlierStageSampler(Sampler):
    """Takes tokens instead of sampling."""

    ranks: Ranks
    noted: Noted

    def keep(self, logits: Tensor, rows: Tensor) -> None:
        """There are no logits here."""

    def sample_kept(self, rows: Tensor, positions: Tensor, wants: Wants) -> None:
        """See `Sampler.sample_kept`."""
        self._draw(self.out, self.out, rows, positions, wants)

    def _draw(
        self,
        logits: Tensor,  # noqa: ARG002  # there are none
        unmasked: Tensor,  # noqa: ARG002  # likewise
        rows: Tensor,
        positions: Tensor,
        wants: Wants,  # noqa: ARG002  # the last stage does all that
        at: int = 0,
        drafts: PlaceDrafts | None = None,  # noqa: ARG002  # refused with stages
    ) -> None:
        self.noted.draws.append(NotedDraws(rows.clone(), positions.clone(), at))

    def begin(self) -> None:
        """See `Sampler.begin`."""
        self.noted.draws = []

    def finish(self, step: int, lines: int) -> None:
        """See `Sampler.finish`."""
        if lines:
            self.noted.forwards.append(NotedForward(step, lines, self.noted.draws))
        self.noted.draws = []

    def receive(self, step: int) -> None:
        """See `Sampler.receive`."""
        while self.noted.forwards and self.noted.forwards[0].step <= step:
            one = self.noted.forwards.popleft()
            tokens = self.ranks.receive_tokens(one.lines)
            for draws in one.draws:
                own = tokens[draws.at : draws.at + len(draws.rows)]
                self.backend.advance(
                    rows=draws.rows,
                    positions=draws.positions,
                    drawn=own.clamp(min=0),
                    broken=(own < 0).to(torch.int32),
                    state=self.rows.state,
                    out=self.out[draws.at :],
                )


def make_sampler(
    ranks: Ranks,
    backend: Backend,
    rows: DeviceRows,
    draws: int,
    lines: int,
    *,
    remembers: bool,
) -> Sampler:
    """Returns the sampler of a rank; the rest is `Sampler`'s."""
    if ranks.place.parallel.pipeline == 1:
        return Sampler(backend, rows, draws, lines, remembers=remembers)
    if ranks.place.is_last_stage:
        last = LastStageSampler(backend, rows, draws, lines)
        last.ranks = ranks
        return last
    earlier = EarlierStageSampler(backend, rows, draws, lines)
    earlier.ranks, earlier.noted = ranks, Noted()
    return earlier

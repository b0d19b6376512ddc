"""The buffers of a pipeline stage: the residual stream enters and leaves the stage's CUDA
graphs there.

A graph of a stage has its own layers alone. It reads the residual stream from one buffer
and writes it to another; what the stages exchange is launched before and after it, in the
order of a step without a graph. So a stage may run a step by a graph while another has
none, and a capture exchanges nothing with other stages.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from attrs import define
from torch import Tensor

from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.dtypes import torch_dtype
from minfer.effects.models.ranks import Communicator


class Graph(Protocol):
    """A captured step."""

    def replay(self) -> None:
        """Launch it."""
        ...


@define(eq=False)
class StageBuffers:
    """The residual stream at the begin and the end of a rank's stage, where the model
    receives and sends it.
    """

    ranks: Communicator
    entering: Tensor  # [tokens, hidden]: graphs read it; no tokens in the first stage
    leaving: Tensor  # [tokens, hidden]: graphs write it; no tokens in the last stage
    is_held: bool = False  # whether the buffers are used, and nothing is exchanged

    @classmethod
    def of(
        cls, ranks: Communicator, spec: ModelSpec, tokens: int, device: torch.device
    ) -> "StageBuffers":
        """Returns the buffers for graphs of up to `tokens` inputs."""
        rank_info, dtype = ranks.rank_info, torch_dtype(spec.dtype)
        entering, leaving = (
            torch.zeros(
                0 if ends else tokens, spec.hidden_size, dtype=dtype, device=device
            )
            for ends in (rank_info.is_first_stage, rank_info.is_last_stage)
        )
        return cls(ranks, entering, leaving)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Exchange nothing with other stages: what is launched can be captured."""
        self.entering.zero_()  # a broken step may have left what is not finite
        self.is_held = True
        try:
            yield
        finally:
            self.is_held = False

    def receive(self, tokens: int) -> Tensor:
        """Returns the residual stream [tokens, hidden] of the stage before."""
        return self.entering[:tokens] if self.is_held else self.ranks.receive(tokens)

    def send(self, hidden: Tensor) -> None:
        """Send the residual stream [tokens, hidden] to the next stage."""
        if self.is_held:
            self.leaving[: len(hidden)].copy_(hidden)
        else:
            self.ranks.send(hidden)

    def replay(self, graph: Graph, tokens: int) -> None:
        """Run a graph with `tokens` inputs, and exchange what a step without one does."""
        rank_info = self.ranks.rank_info
        if tokens and not rank_info.is_first_stage:
            self.ranks.receive(tokens, self.entering[:tokens])
        graph.replay()
        if tokens and not rank_info.is_last_stage:
            self.ranks.send(self.leaving[:tokens])

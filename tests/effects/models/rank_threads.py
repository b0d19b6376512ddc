"""Ranks that are threads of one process: they exchange tensors through shared lists."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from threading import Barrier
from typing import TypeVar

import torch
from attrs import define, field, frozen
from torch import Tensor

from minfer.effects.models.ranks import Parallel, RankInfo

Result = TypeVar("Result")
LIMIT = 60  # seconds that a rank waits for others


@define(eq=False)
class Stage:
    """What the tensor parallel ranks of a stage share."""

    count: int
    parts: list[Tensor] = field(init=False)
    barrier: Barrier = field(init=False)
    calls: int = 0

    def __attrs_post_init__(self) -> None:
        self.parts = [torch.empty(0)] * self.count
        self.barrier = Barrier(self.count, timeout=LIMIT)

    def all(self, index: int, tensor: Tensor) -> list[Tensor]:
        """The parts of all ranks."""
        self.parts[index] = tensor.clone()
        self.barrier.wait()
        parts = [*self.parts]
        self.calls += index == 0
        self.barrier.wait()
        return parts


@frozen(eq=False)
class ThreadRanks:
    """One of the ranks."""

    rank_info: RankInfo
    stage: Stage
    entering: SimpleQueue[Tensor]  # from the stage before
    leaving: SimpleQueue[Tensor]  # to the next one
    tokens: list[SimpleQueue[Tensor]]  # sampled ones, to each rank

    def silent(self) -> AbstractContextManager[None]:
        return nullcontext()

    def leave(self) -> None:
        pass

    def sum(self, partial: Tensor) -> Tensor:
        partials = self.stage.all(self.rank_info.tensor_rank, partial)
        return torch.stack(partials).sum(0)

    def add_sum(self, residual: Tensor, partial: Tensor) -> None:
        residual.add_(self.sum(partial))

    def gather(self, local_columns: Tensor) -> Tensor:
        return torch.cat(self.stage.all(self.rank_info.tensor_rank, local_columns), 1)

    def receive(self, tokens: int, into: Tensor | None = None) -> Tensor:
        hidden = self.entering.get(timeout=LIMIT)
        assert len(hidden) == tokens
        return hidden if into is None else into.copy_(hidden)

    def send(self, hidden: Tensor) -> None:
        self.leaving.put(hidden.clone())

    def send_tokens(self, tokens: Tensor) -> None:
        tensor = self.rank_info.parallel.tensor
        for queue in self.tokens[self.rank_info.rank + tensor :: tensor]:
            queue.put(tokens.clone())

    def receive_tokens(self, lines: int) -> Tensor:
        tokens = self.tokens[self.rank_info.rank].get(timeout=LIMIT)
        assert len(tokens) == lines
        return tokens


def thread_ranks(parallel: Parallel) -> tuple[list[ThreadRanks], list[Stage]]:
    """All ranks, and the stages, the last one first."""
    stages = [Stage(parallel.tensor) for _ in range(parallel.pipeline)]
    queues = [SimpleQueue[Tensor]() for _ in range(parallel.ranks + parallel.tensor)]
    tokens = [SimpleQueue[Tensor]() for _ in range(parallel.ranks)]
    ranks = [
        ThreadRanks(
            RankInfo(rank, parallel),
            stages[rank // parallel.tensor],
            # Of rank 2 and above, the next stage is that of 2 ranks before, and so on.
            queues[rank + parallel.tensor],
            queues[rank],
            tokens,
        )
        for rank in range(parallel.ranks)
    ]
    return ranks, stages


def on_ranks(
    parallel: Parallel, work: Callable[[ThreadRanks], Result]
) -> tuple[list[Result], list[Stage]]:
    """What each rank's work returns, and the stages, the last one first."""
    ranks, stages = thread_ranks(parallel)
    with ThreadPoolExecutor(parallel.ranks) as pool:
        return list(pool.map(work, ranks)), stages

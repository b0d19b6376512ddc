"""How a model is divided among ranks, and what they exchange during a step.

Theory. A *rank* is a process with a device of its own that has a part of a model. All
ranks follow the same plans, each with the same rows and the same block tables, so nothing
about requests is exchanged: only numbers of the model.

- *Tensor parallel* ranks divide every matrix (Shoeybi et al. 2019): the first product of
  a sublayer by column, heads or channels each; the second by row, so that its result is a
  part of a sum over the ranks. Each layer has two such sums. Embedding and output head
  are divided by vocabulary: the embedding is a sum, too. Logits stay divided until they
  are sampled from (running/sampler.py).
- *Expert parallel* ranks are tensor parallel ones that divide a mixture of experts by
  whole experts, instead of a part of each.
- *Pipeline* stages have successive layers each. A stage gets the residual stream of the
  stage before it, and the last one returns the sampled tokens to the others.

Every rank samples from the same logits, or compares the same best tokens of all parts,
with the same noise, so that all know the same tokens. Rank 0 has the engine; it is in the
last stage, where tokens, log-probabilities and vectors arise. With tensor parallel size 2
and 2 stages:

    stage 0   ranks 2, 3     embedding, first half of the layers
    stage 1   ranks 0, 1     second half, output head

Nothing here imports torch: memory plans need it at once.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Final, Protocol

from attrs import frozen

from minfer.effects.models.config_reader import UnsupportedModelError

if TYPE_CHECKING:
    from torch import Tensor


@frozen
class Parallel:
    """How many ranks share a model, and how."""

    tensor: int = 1
    pipeline: int = 1  # stages
    by_expert: bool = False  # whether mixtures are divided by whole experts

    @property
    def ranks(self) -> int:
        """The ranks in all."""
        return self.tensor * self.pipeline

    @property
    def first_ranks(self) -> range:
        """The first rank of each stage, the last stage first."""
        return range(0, self.ranks, self.tensor)


@frozen
class RankInfo:
    """One of the ranks that share a model."""

    rank: int = 0
    parallel: Parallel = Parallel()

    @property
    def tensor_rank(self) -> int:
        """Which part of each divided matrix it has."""
        return self.rank % self.parallel.tensor

    @property
    def has_whole_matrices(self) -> bool:
        """Whether it shares no matrix with other ranks."""
        return self.parallel.tensor == 1

    @property
    def stage(self) -> int:
        """Which stage it is of; rank 0 is of the last one."""
        return self.parallel.pipeline - 1 - self.rank // self.parallel.tensor

    @property
    def is_first_stage(self) -> bool:
        """Whether it embeds tokens."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether it has logits and samples."""
        return self.stage == self.parallel.pipeline - 1

    def layers(self, count: int) -> range:
        """Returns which of `count` layers its stage has; later stages have one more where
        they cannot be divided evenly, as the first one also has the embedding.
        """
        stages = self.parallel.pipeline
        return range(count * self.stage // stages, count * (self.stage + 1) // stages)

    def share(self, size: int, label: str) -> int:
        """Returns `size` divided by the number of tensor parallel ranks. Raises
        `UnsupportedModelError` where they cannot; `label` says what it is.
        """
        ranks = self.parallel.tensor
        if size % ranks:
            divisors = [n for n in range(2, ranks) if size % n == 0]
            remedy = f"use {' or '.join(map(str, divisors))}" if divisors else "use one"
            raise UnsupportedModelError(
                f"{label}: {size} cannot be divided among {ranks} ranks; {remedy} "
                f"(tensor_parallel_size)"
            )
        return size // ranks


WHOLE_MODEL: Final = RankInfo()  # has the whole model


class StageIO(Protocol):
    """Where the residual stream [tokens, hidden] enters and leaves a stage."""

    def receive(self, tokens: int) -> "Tensor":
        """Returns that of the stage before."""
        ...

    def send(self, hidden: "Tensor") -> None:
        """Send it to the next stage."""
        ...


class Communicator(Protocol):
    """What this rank exchanges with the others. All ranks of a stage call the same
    operations in the same order; the results are bit-equal on all of them.
    """

    @property
    def rank_info(self) -> RankInfo:
        """Which rank this is."""
        ...

    def silent(self) -> AbstractContextManager[None]:
        """Within it, nothing is exchanged, and results are meaningless."""
        ...

    def leave(self) -> None:
        """End all exchange."""
        ...

    def sum(self, partial: "Tensor") -> "Tensor":
        """Returns the sum of the parts of all tensor parallel ranks; `partial` may be
        overwritten.
        """
        ...

    def add_sum(self, residual: "Tensor", partial: "Tensor") -> None:
        """Add that sum to the residual stream [tokens, hidden]."""
        ...

    def gather(self, local_columns: "Tensor") -> "Tensor":
        """Returns the columns of all tensor parallel ranks: of [rows, columns],
        [rows, ranks * columns].
        """
        ...

    def receive(self, tokens: int, into: "Tensor | None" = None) -> "Tensor":
        """Returns the residual stream [tokens, hidden] of the stage before, which is
        written to `into`, if given.
        """
        ...

    def send(self, hidden: "Tensor") -> None:
        """Send the residual stream [tokens, hidden] to the next stage."""
        ...

    def send_tokens(self, tokens: "Tensor") -> None:
        """Send sampled tokens [lines] int32 from the last stage to all others."""
        ...

    def receive_tokens(self, lines: int) -> "Tensor":
        """Returns the next tokens [lines] int32 that the last stage has sent."""
        ...


@frozen
class SingleRank:
    """A single rank, which exchanges nothing."""

    rank_info: RankInfo = WHOLE_MODEL

    def silent(self) -> AbstractContextManager[None]:
        """It never exchanges anything."""
        return nullcontext()

    def leave(self) -> None:
        """It never exchanges anything."""

    def sum(self, partial: "Tensor") -> "Tensor":
        """Returns the only part."""
        return partial

    def add_sum(self, residual: "Tensor", partial: "Tensor") -> None:
        """Add the only part."""
        residual.add_(partial)

    def gather(self, local_columns: "Tensor") -> "Tensor":
        """Returns the only part."""
        return local_columns

    def receive(self, tokens: int, into: "Tensor | None" = None) -> "Tensor":
        """There is no stage before."""
        del into
        raise AssertionError(f"{tokens} tokens of a stage before the first")

    def send(self, hidden: "Tensor") -> None:
        """There is no stage behind."""
        raise AssertionError(f"{len(hidden)} tokens for a stage behind the last")

    def send_tokens(self, tokens: "Tensor") -> None:
        """There are no other stages."""
        raise AssertionError(f"{len(tokens)} tokens for stages that are not there")

    def receive_tokens(self, lines: int) -> "Tensor":
        """There are no other stages."""
        raise AssertionError(f"{lines} tokens of a stage that is not there")


SINGLE_RANK: Final = SingleRank()


def whole_logits(
    logits_part: "Tensor", vocab: int, communicator: Communicator
) -> "Tensor":
    """Returns the logits [rows, vocab] of which each rank has a part; rows are
    contiguous for the kernels.
    """
    if communicator.rank_info.has_whole_matrices:
        return logits_part
    return communicator.gather(logits_part)[:, :vocab].contiguous()

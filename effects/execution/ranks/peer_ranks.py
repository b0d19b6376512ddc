"""Sums over ranks on GPUs that can read each other's memory; logits and stages by NCCL.

Which way is fastest depends on the size. Up to `MAX_ONE_SHOT_BYTES` that a rank reads of
the others, latency counts alone, and one wait is less than two; above, a two-shot sum
reads less; large sums are NCCL's. Memory that other ranks can read is torch's symmetric
memory, without multicast.
"""

import logging
import os
from typing import Any, Final

import torch
import torch.distributed as dist
from attrs import define, field
from torch import Tensor

from minfer.effects.execution.device.streams import new_stream, on
from minfer.effects.execution.ranks.torch_ranks import TorchRanks
from minfer.kernels.peer_sum import PROGRAMS, PeerBuffer, flag_bytes, peer_sum

MAX_ONE_SHOT_BYTES: Final = 512 << 10  # read of other ranks
MAX_TWO_SHOT_BYTES: Final = 8 << 20  # of a rank's summand
RELEASED_FLAG: Final = 1 << 62  # more than any number of calls
# Each rank calls its own GPU the first one, which torch takes for one GPU.
OVERLAPPING: Final = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
# A program that uses NVLink's multicast can put GPUs out of service that others share.
MULTICAST: Final = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
_log = logging.getLogger("minfer.executor")


@define(eq=False)
class PeerRanks(TorchRanks):
    """What this rank exchanges with others; see `Communicator` (models/ranks.py)."""

    buffer: PeerBuffer = field(kw_only=True)
    flags: Tensor = field(kw_only=True)  # this rank's
    memory: list[Any] = field(kw_only=True)  # keeps the buffer's memory

    @classmethod
    def of(cls, ranks: TorchRanks) -> "PeerRanks":
        """Returns the same exchange, with sums through memory that all ranks of a stage
        can read. Raises RuntimeError where there is none.
        """
        import torch.distributed._symmetric_memory as symmetric

        os.environ.setdefault(OVERLAPPING, "1")
        os.environ[MULTICAST] = "1"
        count, device = ranks.rank_info.parallel.tensor, ranks.device
        group = ranks.tensor.group_name
        size = 2 * MAX_TWO_SHOT_BYTES // ranks.dtype.itemsize
        data = symmetric.empty(size, dtype=ranks.dtype, device=device)
        words = flag_bytes(count) // 8
        flags = symmetric.empty(words, dtype=torch.int64, device=device).zero_()
        torch.cuda.synchronize(device)  # flags are zero before others write to them
        shared = [symmetric.rendezvous(tensor, group) for tensor in (data, flags)]
        halves = tuple(
            shared[0].get_buffer(i, (size,), ranks.dtype) for i in range(count)
        )
        buffer = PeerBuffer(
            rank=ranks.rank_info.tensor_rank,
            halves=halves,
            flags=torch.tensor(shared[1].buffer_ptrs, dtype=torch.int64, device=device),
            calls=torch.zeros(PROGRAMS, dtype=torch.int64, device=device),
        )
        return cls(
            ranks.rank_info,
            device,
            ranks.hidden,
            ranks.dtype,
            ranks.tensor,
            ranks.tokens,
            buffer=buffer,
            flags=flags,
            memory=[data, *shared],
        )

    def sum(self, partial: Tensor) -> Tensor:
        """See `Communicator.sum`."""
        if not self._is_small(partial):
            return super().sum(partial)
        if not self.is_silent:
            peer_sum(partial, self.buffer, two_shot=self._reads_less(partial))
        return partial

    def add_sum(self, residual: Tensor, partial: Tensor) -> None:
        """See `Communicator.add_sum`."""
        if not self._is_small(partial) or not residual.is_contiguous():
            super().add_sum(residual, partial)
        elif not self.is_silent:
            peer_sum(partial, self.buffer, residual, self._reads_less(partial))

    def release(self) -> None:
        """See `TorchRanks.release`. Kernels wait until their rank's flags are large."""
        with on(new_stream(self.device)):
            self.flags.fill_(RELEASED_FLAG)
        super().release()

    def warm(self) -> None:
        """Have all kernels compiled and loaded, and try them with small integers, whose
        sums are exact. Raises RuntimeError for wrong ones.
        """
        count, rows = self.rank_info.parallel.tensor, 1
        while rows * self.hidden * self.dtype.itemsize <= MAX_TWO_SHOT_BYTES:
            size = rows * self.hidden
            values = torch.arange(size, device=self.device).remainder(7)
            values = values.view(rows, self.hidden).to(self.dtype)
            total = values * (count * (count + 1) // 2)
            partial, residual = values * (self.rank_info.tensor_rank + 1), values.clone()
            self.add_sum(residual, partial)
            if not residual.equal(total + values) or not self.sum(partial).equal(total):
                raise RuntimeError(f"sums of {rows} rows through peers' memory are wrong")
            rows *= 4

    def _is_small(self, partial: Tensor) -> bool:
        is_same_kind = partial.is_contiguous() and partial.dtype is self.dtype
        return partial.nbytes <= MAX_TWO_SHOT_BYTES and is_same_kind and len(partial) > 0

    def _reads_less(self, partial: Tensor) -> bool:
        """Returns whether a two-shot sum is the faster one."""
        return partial.nbytes * (self.rank_info.parallel.tensor - 1) > MAX_ONE_SHOT_BYTES


def with_peer_memory(ranks: TorchRanks) -> TorchRanks:
    """Returns ranks that sum through memory that all can read, where there is such; all
    of a stage must have it.
    """
    if ranks.rank_info.has_whole_matrices:
        return ranks
    peer_ranks, reason = ranks, ""
    try:
        peer_ranks = PeerRanks.of(ranks)
        peer_ranks.warm()
    except (RuntimeError, ImportError) as error:
        reason = str(error).strip().partition("\n")[0]
    has_memory = torch.tensor([not reason], dtype=torch.int32, device=ranks.device)
    dist.all_reduce(has_memory, group=ranks.tensor)
    if int(has_memory) < ranks.rank_info.parallel.tensor:
        _log.warning("sums over ranks are NCCL's alone: %s", reason or "of another rank")
        return ranks
    return peer_ranks

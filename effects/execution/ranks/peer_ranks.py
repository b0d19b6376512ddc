"""Sums over ranks on GPUs that can read each other's memory; logits and stages by NCCL.

Which way is fastest depends on the size. Up to `ONE_SHOT` bytes that a rank reads of the
others latency counts alone, and one wait is less than two; above, a two-shot sum reads
less; large sums are NCCL's. Memory that other ranks can read is torch's symmetric memory,
without multicast.
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

ONE_SHOT: Final = 512 << 10  # bytes read of other ranks, at most
TWO_SHOT: Final = 8 << 20  # bytes of a part, at most
RELEASED: Final = 1 << 62  # more than any number of calls
# Each rank calls its own GPU the first one, which torch takes for one GPU.
OVERLAPPING: Final = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
# A program that uses NVLink's multicast can put GPUs out of service that others share.
MULTICAST: Final = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
_log = logging.getLogger("minfer.executor")


@define(eq=False)
class PeerRanks(TorchRanks):
    """What this rank exchanges with others; see `minfer.effects.models.ranks.Ranks`."""

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
        count, device = ranks.place.parallel.tensor, ranks.device
        group = ranks.tensor.group_name
        size = 2 * TWO_SHOT // ranks.dtype.itemsize
        data = symmetric.empty(size, dtype=ranks.dtype, device=device)
        words = flag_bytes(count) // 8
        flags = symmetric.empty(words, dtype=torch.int64, device=device).zero_()
        torch.cuda.synchronize(device)  # flags are zero before others write to them
        shared = [symmetric.rendezvous(one, group) for one in (data, flags)]
        halves = tuple(
            shared[0].get_buffer(i, (size,), ranks.dtype) for i in range(count)
        )
        buffer = PeerBuffer(
            rank=ranks.place.part,
            halves=halves,
            flags=torch.tensor(shared[1].buffer_ptrs, dtype=torch.int64, device=device),
            calls=torch.zeros(PROGRAMS, dtype=torch.int64, device=device),
        )
        return cls(
            ranks.place,
            device,
            ranks.hidden,
            ranks.dtype,
            ranks.tensor,
            ranks.tokens,
            buffer=buffer,
            flags=flags,
            memory=[data, *shared],
        )

    def sum(self, part: Tensor) -> Tensor:
        """See `Ranks.sum`."""
        if not self._is_small(part):
            return super().sum(part)
        if not self.is_silent:
            peer_sum(part, self.buffer, two_shot=self._reads_less(part))
        return part

    def add_sum(self, residual: Tensor, part: Tensor) -> None:
        """See `Ranks.add_sum`."""
        if not self._is_small(part) or not residual.is_contiguous():
            super().add_sum(residual, part)
        elif not self.is_silent:
            peer_sum(part, self.buffer, residual, self._reads_less(part))

    def release(self) -> None:
        """See `TorchRanks.release`. Kernels wait until their rank's flags are large."""
        with on(new_stream(self.device)):
            self.flags.fill_(RELEASED)
        super().release()

    def warm(self) -> None:
        """Have all kernels compiled and loaded, and try them with small integers, whose
        sums are exact. Raises RuntimeError for wrong ones.
        """
        count, rows = self.place.parallel.tensor, 1
        while rows * self.hidden * self.dtype.itemsize <= TWO_SHOT:
            size = rows * self.hidden
            some = torch.arange(size, device=self.device).remainder(7)
            some = some.view(rows, self.hidden).to(self.dtype)
            total = some * (count * (count + 1) // 2)
            part, residual = some * (self.place.part + 1), some.clone()
            self.add_sum(residual, part)
            if not residual.equal(total + some) or not self.sum(part).equal(total):
                raise RuntimeError(f"sums of {rows} rows through peers' memory are wrong")
            rows *= 4

    def _is_small(self, part: Tensor) -> bool:
        alike = part.is_contiguous() and part.dtype is self.dtype
        return part.nbytes <= TWO_SHOT and alike and len(part) > 0

    def _reads_less(self, part: Tensor) -> bool:
        """Whether a two-shot sum is the faster one."""
        return part.nbytes * (self.place.parallel.tensor - 1) > ONE_SHOT


def through_memory(ranks: TorchRanks) -> TorchRanks:
    """Returns ranks that sum through memory that all can read, where there is such; all
    of a stage must have it.
    """
    if ranks.place.has_whole_matrices:
        return ranks
    made, why = ranks, ""
    try:
        made = PeerRanks.of(ranks)
        made.warm()
    except (RuntimeError, ImportError) as error:
        why = str(error).strip().partition("\n")[0]
    able = torch.tensor([not why], dtype=torch.int32, device=ranks.device)
    dist.all_reduce(able, group=ranks.tensor)
    if int(able) < ranks.place.parallel.tensor:
        _log.warning("sums over ranks are NCCL's alone: %s", why or "of another rank")
        return ranks
    return made

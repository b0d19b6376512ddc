"""Sums and logits over ranks, by torch.distributed: gloo on the CPU, NCCL on GPUs.

All are launched on the current stream, and NCCL's can be captured in CUDA graphs. Each is
a reduction followed by a distribution of its result, so all ranks get the same bits.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from attrs import define, field
from torch import Tensor

from minfer.effects.execution.device.streams import new_stream, on
from minfer.effects.models.ranks import RankInfo

# Seconds that a sum on the CPU waits for a rank. One that has died ends it at once, and
# one that is silent is killed before that (worker_group.py).
SUM_SECONDS: Final = 60.0
# Variables that name the network interface at which the sockets of gloo and NCCL listen.
INTERFACES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
LOOPBACK: Final = "lo0" if sys.platform == "darwin" else "lo"
# torch 2.13 renamed it.
GATHER: Final = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class RankGroupError(RuntimeError):
    """The ranks cannot reach each other."""


@define(eq=False)
class TorchRanks:
    """What this rank exchanges with others; see `Communicator` (models/ranks.py)."""

    rank_info: RankInfo
    device: torch.device
    hidden: int  # width of the residual stream
    dtype: torch.dtype
    tensor: Any = None  # torch.distributed's group of this stage
    tokens: Any = None  # its group of sampled tokens, which cross beside other sends
    # Whether nothing is exchanged, while kernels are compiled on each rank by itself.
    is_silent: bool = field(default=False, init=False)
    _sent: list[Any] = field(factory=list, init=False)  # what may not be received yet
    _stream: "torch.cuda.Stream | None" = field(init=False)  # of sampled tokens

    def __attrs_post_init__(self) -> None:
        self._stream = new_stream(self.device)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Exchange nothing; results are meaningless."""
        self.is_silent = True
        try:
            yield
        finally:
            self.is_silent = False

    def leave(self) -> None:
        """See `Communicator.leave`."""
        leave()

    def release(self) -> None:
        """End what waits for a rank that is lost, from any thread: on a GPU; on the CPU
        the end of a connection does.
        """
        if dist.is_initialized() and self.device.type == "cuda":
            dist.distributed_c10d._abort_process_group()

    def sum(self, partial: Tensor) -> Tensor:
        """See `Communicator.sum`."""
        if not self.is_silent and not self.rank_info.has_whole_matrices:
            dist.all_reduce(partial, group=self.tensor)
        return partial

    def add_sum(self, residual: Tensor, partial: Tensor) -> None:
        """See `Communicator.add_sum`."""
        residual.add_(self.sum(partial))

    def gather(self, local_columns: Tensor) -> Tensor:
        """See `Communicator.gather`."""
        count, (rows, columns) = self.rank_info.parallel.tensor, local_columns.shape
        gathered = local_columns.new_empty(count, rows, columns)
        if self.is_silent:
            gathered.zero_()
        else:
            GATHER(
                gathered.view(-1, columns), local_columns.contiguous(), group=self.tensor
            )
        return gathered.transpose(0, 1).reshape(rows, count * columns)

    def receive(self, tokens: int, into: Tensor | None = None) -> Tensor:
        """See `Communicator.receive`."""
        shape = (tokens, self.hidden)
        if self.is_silent:
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        if into is None:
            into = torch.empty(shape, dtype=self.dtype, device=self.device)
        dist.recv(into, src=self.rank_info.rank + self.rank_info.parallel.tensor)
        return into

    def send(self, hidden: Tensor) -> None:
        """See `Communicator.send`."""
        if not self.is_silent:
            dist.send(
                hidden.contiguous(),
                dst=self.rank_info.rank - self.rank_info.parallel.tensor,
            )

    def send_tokens(self, tokens: Tensor) -> None:
        """See `Communicator.send_tokens`. Nothing waits until they are received."""
        self._sent = [handle for handle in self._sent if not handle.is_completed()]
        stages = self.rank_info.parallel
        first = self.rank_info.rank + stages.tensor
        receivers = range(first, stages.ranks, stages.tensor)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            tokens.record_stream(self._stream)
        with on(self._stream):
            self._sent += [
                dist.isend(tokens, dst=receiver, group=self.tokens)
                for receiver in receivers
            ]

    def receive_tokens(self, lines: int) -> Tensor:
        """See `Communicator.receive_tokens`."""
        tokens = torch.empty(lines, dtype=torch.int32, device=self.device)
        dist.recv(tokens, src=self.rank_info.tensor_rank, group=self.tokens)
        return tokens


def join_ranks(
    rank_info: RankInfo,
    store: Path,
    device: torch.device,
    hidden: int,
    dtype: torch.dtype,
) -> TorchRanks:
    """Returns the exchange of this rank with the others, which call this at the same
    time; through the file `store` their sockets find each other. Raises RankGroupError.
    """
    if dist.is_initialized():
        raise RankGroupError(
            "this process already has an engine of several ranks, or uses "
            "torch.distributed itself; close that first, or use another process"
        )
    try:
        with _on_loopback():
            return _connect(rank_info, store, device, hidden, dtype)
    except (RuntimeError, ValueError) as error:
        leave()
        line = str(error).strip().partition("\n")[0]
        backend = _backend(device)
        raise RankGroupError(
            f"rank {rank_info.rank} cannot exchange tensors with the others by "
            f"{backend}: {line}"
        ) from error


def _backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Have gloo and NCCL listen at loopback addresses, as all ranks are on one machine:
    their sockets take connections from everywhere, without a password.
    """
    before = {name: os.environ.get(name) for name in INTERFACES}
    os.environ.update(dict.fromkeys(INTERFACES, LOOPBACK))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _connect(
    rank_info: RankInfo,
    store: Path,
    device: torch.device,
    hidden: int,
    dtype: torch.dtype,
) -> TorchRanks:
    """See `join_ranks`. Raises RuntimeError and ValueError."""
    parallel = rank_info.parallel
    stores: Any = dist  # they are public, but torch's types do not say so
    dist.init_process_group(
        _backend(device),
        # Not a TCPStore, which listens at all addresses, without a password.
        store=stores.FileStore(str(store), parallel.ranks),
        rank=rank_info.rank,
        world_size=parallel.ranks,
        timeout=timedelta(seconds=SUM_SECONDS),
    )
    groups = [
        dist.new_group([*range(first, first + parallel.tensor)])
        for first in range(0, parallel.ranks, parallel.tensor)
    ]
    tokens = dist.new_group([*range(parallel.ranks)])
    stage = groups[rank_info.rank // parallel.tensor]
    ranks = TorchRanks(rank_info, device, hidden, dtype, stage, tokens)
    # Connections are made by the first sums: they must not be made in a capture.
    with torch.inference_mode():
        for size in (1, 1 << 20):
            ranks.sum(torch.zeros(1, size, dtype=dtype, device=device))
        ranks.gather(torch.zeros(1, 8, dtype=dtype, device=device))
        _connect_stages(ranks)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return ranks


def _connect_stages(ranks: TorchRanks) -> None:
    """Send once between all stages, so that their connections are made."""
    rank_info = ranks.rank_info
    if rank_info.parallel.pipeline == 1:
        return
    hidden = torch.zeros(1, ranks.hidden, dtype=ranks.dtype, device=ranks.device)
    if not rank_info.is_first_stage:
        ranks.receive(1)
    if not rank_info.is_last_stage:
        ranks.send(hidden)
        ranks.receive_tokens(1)
    else:
        ranks.send_tokens(torch.zeros(1, dtype=torch.int32, device=ranks.device))


def leave() -> None:
    """End the exchange of this process."""
    if dist.is_initialized():
        dist.destroy_process_group()

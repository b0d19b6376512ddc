"""us of sums over ranks in a CUDA graph, printed by rank 0: for `bench.ranks_gpu`, which
starts this with torchrun.
"""

import os
import sys
from functools import partial
from typing import Final

import torch
import torch.distributed as dist

from bench.gpu_times import microseconds
from minfer.effects.execution.ranks.peer_ranks import with_peer_memory
from minfer.effects.execution.ranks.torch_ranks import TorchRanks
from minfer.effects.models.ranks import Parallel, RankInfo

CALLS: Final = 50  # of a graph


def main() -> None:
    """Measure each number of rows."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device, kind = torch.device("cuda", rank), torch.bfloat16
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    hidden = int(sys.argv[1])
    rank_info = RankInfo(rank, Parallel(tensor=ranks))
    nccl = TorchRanks(rank_info, device, hidden, kind, dist.group.WORLD)
    in_memory = with_peer_memory(nccl)
    for rows in map(int, sys.argv[2].split(",")):
        partial_sum = torch.zeros(rows, hidden, dtype=kind, device=device)
        residual = partial_sum.clone()
        for name, communicator in (("nccl", nccl), ("sum", in_memory)):
            calls = [partial(communicator.add_sum, residual, partial_sum)] * CALLS
            us = microseconds(calls, ready=dist.barrier)
            if rank == 0:
                print(name, rows, f"{us:.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

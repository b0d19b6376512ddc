"""us of sums over ranks in a CUDA graph, printed by rank 0: for `bench.ranks_gpu`, which
starts this with torchrun.
"""

import os
import sys
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist

from minfer.effects.execution.ranks.peer_ranks import through_memory
from minfer.effects.execution.ranks.torch_ranks import TorchRanks
from minfer.effects.models.ranks import Parallel, Place

CALLS: Final = 50  # of a graph
REPLAYS: Final = 20


def events() -> tuple[Any, Any]:
    """Two events of the GPU's clock."""
    make: Any = torch.cuda.Event  # untyped
    return make(enable_timing=True), make(enable_timing=True)


def microseconds(tensor: torch.Tensor, call: Any) -> float:
    """us of one call, of many in a graph."""
    for _ in range(3):
        call(tensor)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call(tensor)
    graph.replay()
    dist.barrier()
    begin, end = events()
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return float(1e3 * begin.elapsed_time(end) / CALLS / REPLAYS)


def main() -> None:
    """Measure each number of rows."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device, kind = torch.device("cuda", rank), torch.bfloat16
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    hidden = int(sys.argv[1])
    place = Place(rank, Parallel(tensor=ranks))
    nccl = TorchRanks(place, device, hidden, kind, dist.group.WORLD)
    made = through_memory(nccl)
    for rows in map(int, sys.argv[2].split(",")):
        part = torch.zeros(rows, hidden, dtype=kind, device=device)
        residual = part.clone()
        for name, one in (("nccl", nccl), ("sum", made)):
            us = microseconds(part, partial(one.add_sum, residual))
            if rank == 0:
                print(name, rows, f"{us:.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

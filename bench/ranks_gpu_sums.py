"""us of sums over ranks in a CUDA graph, printed by rank 0: for `bench.ranks_gpu`, which
starts this with torchrun.
"""

import os
import sys
from typing import Any, Final

import torch
import torch.distributed as dist

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
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    hidden = int(sys.argv[1])
    for rows in map(int, sys.argv[2].split(",")):
        tensor = torch.zeros(rows, hidden, dtype=torch.bfloat16, device="cuda")
        us = microseconds(tensor, dist.all_reduce)
        if rank == 0:
            print("sum", rows, f"{us:.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

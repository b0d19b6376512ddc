"""Sums over ranks, by kernels of several processes that read each other's memory."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from minfer.kernels.peer_sum import (
    PROGRAMS,
    PeerBuffer,
    flag_bytes,
    peer_sum,
    reference,
)
from tests.circles import long

from .conftest import CUDA

HALF = 160 * 1024  # elements
# Rows, columns, whether it is a two-shot sum, and whether there is a residual.
CALLS = (
    (1, 64, False, True),
    (1, 64, False, False),
    (3, 96, True, True),
    (5, 1000, False, True),
    (5, 1000, True, False),
    (1, 16, True, True),
    (300, 512, False, True),  # more tiles than programs
    (300, 512, True, True),
    (2, 640, True, False),
)


def drawn(seed: int, rows: int, columns: int) -> Tensor:
    """The same numbers in every process."""
    dice = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=dice)


def work(folder: str, rank: int, ranks: int, rounds: int) -> None:
    """What one rank does: calls, with pauses, each beside the reference."""
    sizes, float_type = {"flags": flag_bytes(ranks) // 8, "half": 2 * HALF}, torch.float32
    names = [f"{folder}/{peer}" for peer in range(ranks)]
    flags, halves = (
        [torch.from_file(f"{name}.{kind}", True, size, dtype=dtype) for name in names]
        for (kind, size), dtype in zip(
            sizes.items(), (torch.int64, float_type), strict=True
        )
    )
    buffer = PeerBuffer(
        rank=rank,
        halves=tuple(halves),
        flags=torch.tensor([tensor.data_ptr() for tensor in flags]),
        calls=torch.zeros(PROGRAMS, dtype=torch.int64),
    )
    dice = random.Random(rank)

    def pause(*_: object) -> None:
        """At a barrier: what the others do meanwhile must not change what is read."""
        if dice.random() < 0.05:
            time.sleep(dice.random() / 50)

    InterpreterBuilder.create_barrier = pause
    for number in range(rounds):
        rows, columns, two, adds = CALLS[number % len(CALLS)]
        addends = [drawn(number * 9 + peer, rows, columns) for peer in range(ranks)]
        residual = drawn(number * 9 + 8, rows, columns) if adds else None
        expected = reference(addends, residual)
        out = addends[rank] if residual is None else residual
        peer_sum(addends[rank], buffer, residual, two)
        assert torch.equal(out, expected), f"rank {rank}, call {number}"


@pytest.mark.skipif(CUDA, reason="bench/ranks_gpu_sums.py has several GPUs")
@pytest.mark.parametrize(("ranks", "rounds"), [(2, 2 * len(CALLS)), *long([(3, 45)])])
def test_all_ranks_have_the_sum_in_rank_order(
    tmp_path: Path, ranks: int, rounds: int
) -> None:
    script = "import sys; from tests.kernels.test_peer_sum import work; "
    script += "work(sys.argv[1], *map(int, sys.argv[2:]))"
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", script, str(tmp_path)]
    processes = [
        subprocess.Popen([*command, *map(str, (rank, ranks, rounds))], env=env)
        for rank in range(ranks)
    ]
    try:
        assert [process.wait(60) for process in processes] == [0] * ranks
    finally:
        for process in processes:
            process.kill()


def test_what_the_buffer_does_not_hold_is_refused() -> None:
    flags, half = torch.zeros(1, dtype=torch.int64), torch.zeros(64)
    buffer = PeerBuffer(0, (half,), flags, flags)
    with pytest.raises(ValueError, match="33 elements"):
        peer_sum(torch.zeros(1, 33), buffer)
    with pytest.raises(ValueError, match="bfloat16"):
        peer_sum(torch.zeros(1, 8, dtype=torch.bfloat16), buffer)

"""Ranks that torchrun starts: what they say, and that they do not outlive it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import pytest

from tests.effects.waiting import alive

TORCHRUN: Final = [
    *[sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"],
    *["--standalone", "-m", "minfer"],  # at a free port
]
OPTIONS: Final = ["--device=cpu", "--dtype=float32"]
RANKS: Final = "--tensor-parallel-size=2"
SOON: Final = 5.0  # seconds for what the system does at once


def output(*command: str) -> str:
    """What a command that succeeds prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.long
def test_ranks_of_torchrun_say_what_one_process_says() -> None:
    generate = ["generate", *OPTIONS, "--temperature=0", "--max-tokens=24", "def read("]
    expected = output(sys.executable, "-m", "minfer", *generate)
    assert len(expected.split()) > 5
    assert output(*TORCHRUN, *generate, RANKS) == expected


def children(process: int) -> list[int]:
    """Processes that it has started, in any of its threads."""
    files = Path(f"/proc/{process}/task").glob("*/children")
    return [int(number) for file in files for number in file.read_text().split()]


@pytest.mark.long
def test_no_rank_outlives_torchrun() -> None:
    command = [*TORCHRUN, "serve", "--port=0", *OPTIONS, RANKS]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as torchrun:
        try:
            assert torchrun.stdout is not None
            assert "is served at" in torchrun.stdout.readline()
            ranks = children(torchrun.pid)
            # What an API server starts ends when it has read that its API server has
            # ended.
            inner = [child for rank in ranks for child in children(rank)]
            assert (len(ranks), len(inner)) == (
                2,
                2,
            )  # rank 0's engine, and an API server
        finally:
            torchrun.kill()
        end = time.monotonic() + SOON
        while (left := list(filter(alive, ranks + inner))) and time.monotonic() < end:
            time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left

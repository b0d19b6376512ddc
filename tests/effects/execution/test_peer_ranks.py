"""Sums through memory that GPUs share, where not all of them can read each other's."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from minfer.effects.execution.ranks.peer_ranks import PeerRanks, with_peer_memory
from minfer.effects.execution.ranks.torch_ranks import TorchRanks
from minfer.effects.models.ranks import Parallel, RankInfo


class Warmed(TorchRanks):
    """Sums through memory that work."""

    def warm(self) -> None:
        pass


@pytest.mark.parametrize("unable", [None, 0, 1])
def test_all_ranks_sum_through_memory_or_none(
    unable: int | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def of(ranks: TorchRanks) -> Warmed:
        if ranks.rank_info.rank == unable:
            raise RuntimeError("no peer access\nand where that was found")
        return Warmed(
            ranks.rank_info, ranks.device, ranks.hidden, ranks.dtype, ranks.tensor
        )

    monkeypatch.setattr(PeerRanks, "of", of)
    torch_ranks: Any = dist  # its stores are public, but not said to be
    store = torch_ranks.HashStore()
    names = ["minfer-test-rank-0", "minfer-test-rank-1"]

    def on_rank(rank: int) -> TorchRanks:
        threading.current_thread().name = names[rank]
        group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=20))
        rank_info = RankInfo(rank, Parallel(tensor=2))
        plain = TorchRanks(rank_info, torch.device("cpu"), 8, torch.float32, group)
        return with_peer_memory(plain)

    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(2) as pool:
        all_kinds = list(pool.map(on_rank, range(2)))
    kind = Warmed if unable is None else TorchRanks
    assert [type(record) for record in all_kinds] == [kind, kind]
    messages = {record.threadName: record.getMessage() for record in caplog.records}
    if unable is None:
        assert not messages
    else:
        assert messages == {
            names[unable]: "sums over ranks are NCCL's alone: no peer access",
            names[1 - unable]: "sums over ranks are NCCL's alone: of another rank",
        }

"""Ranks that have a part of the logits each sample what one rank samples from all of
them, and gather them only where they must.
"""

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

import pytest
import torch
from attrs import asdict, frozen
from torch import Tensor

from minfer import kernels
from minfer.effects.execution.cuda.cuda_backend import CudaBackend
from minfer.effects.execution.device.device_rows import DeviceRows, SamplingNeeds
from minfer.effects.execution.device.routes import Routes
from minfer.effects.execution.running.sampler import Sampler
from minfer.effects.models.ranks import SINGLE_RANK, Communicator, Parallel
from minfer.kernels import plain, sample
from minfer.records.request import Request, SamplingParams
from tests.core.executing import opened
from tests.effects.models.rank_threads import ThreadRanks, on_ranks

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="ranks on GPUs: bench/ranks_gpu.py"
)
CPU = torch.device("cpu")
VOCAB, CHUNK, PART = 90, 32, 64  # the second rank has tokens 64 to 89
WANTS = {
    "plain": SamplingNeeds(filtered=False, scored=False),
    "filtered": SamplingNeeds(filtered=True, scored=False),
    "scored": SamplingNeeds(filtered=False, scored=True),
    "shaped": SamplingNeeds(filtered=False, scored=False, shaped=True),
}
HOWS: dict[str, tuple[dict[str, Any], ...]] = {
    "plain": ({},) * 6,
    "filtered": ({"top_k": 3}, {}, {"top_p": 0.7}, {}, {}, {}),
    "scored": ({"logprobs": 2}, {}, {}, {}, {"logprobs": 0}, {}),
    "shaped": ({"logit_bias": ((70, 9.0),)}, {}, {}, {}, {}, {}),
}
ROWS = torch.tensor([5, 3, 0, 1, 4, 2], dtype=torch.int32)
POSITIONS = ROWS + 9
Work = Callable[[Sampler, Tensor], None]  # with a rank's part of the logits
TURN = Lock()  # the interpreter of kernels is for one thread


@frozen(eq=False)
class InTurn(ThreadRanks):
    """Ranks of which one runs at a time, and that note the columns they exchange."""

    columns: list[int]

    def gather(self, local_columns: Tensor) -> Tensor:
        self.columns.append(local_columns.shape[1])
        TURN.release()
        try:
            return ThreadRanks.gather(self, local_columns)
        finally:
            TURN.acquire()


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = sample.SIZES._replace(chunk=CHUNK, group=16, span=64, block=32, samples=16)
    monkeypatch.setattr(sample, "SIZES", sizes)
    monkeypatch.setattr(kernels, "interpreting", True)


def sampler(hows: Sequence[dict[str, Any]], ranks: Communicator = SINGLE_RANK) -> Sampler:
    """Of rows that are open; each second one is greedy."""
    rows = DeviceRows(len(hows), 4, VOCAB, CPU)
    new_sampler = Sampler(CudaBackend(CPU, Routes()), rows, 8, ranks=ranks)
    for row, sampling in enumerate(hows):
        params = SamplingParams(temperature=row % 2 * 0.9, **sampling)
        request = Request(
            id=str(row), prompt=(3,), max_tokens=9, sampling=params, seed=row
        )
        new_sampler.open(row, opened(request, (row,)))
    plain.scatter(
        rows.arena,
        torch.cat([torch.from_numpy(words_part) for words_part in rows.take()]),
    )
    return new_sampler


def check(kind: str, work: Work) -> list[int]:
    """Check that two ranks do what one does; returns what columns one exchanged."""
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(4))
    logits[:, PART:] += 1  # where noise decides
    expected_sampler = sampler(HOWS[kind])
    work(expected_sampler, logits)
    padded = torch.cat((logits, torch.full((6, 2 * PART - VOCAB), 3.0)), 1)

    def on_rank(ranks: ThreadRanks) -> tuple[Sampler, list[int]]:
        columns = list[int]()
        rank_ranks = InTurn(**asdict(ranks, recurse=False), columns=columns)
        columns_part = padded[:, ranks.rank_info.tensor_rank * PART :][
            :, :PART
        ].contiguous()
        with TURN:
            rank_sampler = sampler(HOWS[kind], rank_ranks)
            work(rank_sampler, columns_part)
        return rank_sampler, columns

    by_rank, _ = on_ranks(Parallel(tensor=2), on_rank)
    for rank_sampler, _ in by_rank:
        assert rank_sampler.out.equal(expected_sampler.out)
        assert rank_sampler.scores.equal(expected_sampler.scores)
        assert rank_sampler.rows.arena.equal(expected_sampler.rows.arena)
    assert len({*expected_sampler.out[:6].tolist()}) > 3
    return by_rank[0][1]


@pytest.mark.parametrize("kind", [*WANTS])
def test_ranks_sample_what_one_samples(kind: str) -> None:
    columns = check(
        kind,
        lambda sampler, logits_part: sampler.sample(
            logits_part, ROWS, POSITIONS, WANTS[kind]
        ),
    )
    assert columns == [PART // CHUNK if kind == "plain" else PART]


@pytest.mark.parametrize("kind", ["plain", "scored"])
def test_ranks_sample_what_one_samples_from_kept_logits(kind: str) -> None:
    def work(sampler: Sampler, logits_part: Tensor) -> None:
        sampler.masks.lines[:6] = -1
        sampler.masks.lines[2, :2] = 0  # one row may have no token of the first rank
        sampler.keep(logits_part.flip(0), ROWS.flip(0))
        sampler.sample_kept(ROWS, POSITIONS, WANTS[kind])

    assert check(kind, work) == [PART]

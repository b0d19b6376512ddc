"""Both backends mean the same, on the CPU."""

from typing import Any

import pytest
import torch
from attrs import evolve

from minfer.effects.execution.cpu.cpu_backend import CpuBackend
from minfer.effects.execution.cuda.cuda_backend import CudaBackend
from minfer.effects.execution.device.backend import Backend
from minfer.effects.execution.device.device_rows import DeviceRows, SamplingNeeds
from minfer.effects.execution.open_backend import open_backend
from minfer.effects.execution.running.sampler import Sampler
from minfer.kernels import plain
from minfer.records.config import EngineConfig
from minfer.records.request import Request, SamplingParams
from tests.core.executing import opened
from tests.effects.setup.test_memory import QWEN_05B

CPU = torch.device("cpu")
VOCAB = 60
SPEC = evolve(QWEN_05B, vocab_size=VOCAB, dtype="float32")
CONFIG = EngineConfig(
    num_blocks=9,
    block_size=16,
    max_model_len=64,
    max_num_seqs=6,
    max_num_batched_tokens=64,
    vocab_size=VOCAB,
)
HOWS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.9},
    {"temperature": 0.5, "top_k": 3},
    {"temperature": 1.5, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.2, "logprobs": 4},
    {"temperature": 0, "top_k": 2, "logprobs": 0},
)


def backends() -> tuple[Backend, Backend]:
    return CpuBackend(), CudaBackend.make(SPEC, CONFIG, CPU)


def rows_with_owners() -> DeviceRows:
    rows = DeviceRows(len(HOWS), 4, VOCAB, CPU)
    for row, sampling in enumerate(HOWS):
        params = SamplingParams(**sampling)
        request = Request(
            id=str(row), prompt=(3,), max_tokens=9, sampling=params, seed=row
        )
        rows.open(row, opened(request, (row,)))
    plain.scatter(
        rows.arena,
        torch.cat([torch.from_numpy(words_part) for words_part in rows.take()]),
    )
    return rows


def test_the_device_decides_which_it_is() -> None:
    assert isinstance(open_backend(SPEC, CONFIG, CPU, kernels=False), CpuBackend)
    assert isinstance(open_backend(SPEC, CONFIG, CPU, kernels=True), CudaBackend)
    assert not open_backend(SPEC, CONFIG, CPU, kernels=False).described


@pytest.mark.long
def test_they_draw_the_same() -> None:
    """Also for the scratch row, which pads, and whatever the order."""
    reference, backend = backends()
    rows = rows_with_owners()
    torch.manual_seed(0)
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 6, 1], [2], [6, 6]):
        device_rows = torch.tensor(order, dtype=torch.int32)
        for _ in range(20):
            logits = torch.randn(len(device_rows), VOCAB) * 3
            positions = torch.randint(1, 5000, (len(device_rows),), dtype=torch.int32)
            drawn = [
                each_backend.sample(
                    logits.clone(), device_rows, rows, positions, filtered=True
                )
                for each_backend in (reference, backend)
            ]
            assert drawn[0].tokens.tolist() == drawn[1].tokens.tolist()
            assert not drawn[0].broken.any()
            assert not drawn[1].broken.any()


def test_they_draw_by_other_streams_alike() -> None:
    rows, device_rows = (
        rows_with_owners(),
        torch.tensor([5, 3, 6, 1, 2], dtype=torch.int32),
    )
    logits, positions = torch.randn(5, VOCAB), device_rows + 30
    drawn = list[list[int]]()
    for backend in backends():
        for streams in (None, rows.stream, rows.stream + 1):
            sampled = backend.sample(
                logits, device_rows, rows, positions, filtered=True, streams=streams
            )
            drawn.append(sampled.tokens.tolist())
    assert drawn[:3] == drawn[3:]
    assert drawn[0] == drawn[1] != drawn[2]
    assert [drawn[0][i] for i in (0, 2)] == [drawn[2][i] for i in (0, 2)]  # greedy


def test_they_say_the_same_of_logits_that_are_not_finite() -> None:
    logits = torch.randn(4, VOCAB)
    logits[1, 3] = torch.nan
    logits[2] = -torch.inf
    device_rows = torch.arange(4, dtype=torch.int32)
    for backend in backends():
        drawn = backend.sample(
            logits, device_rows, rows_with_owners(), device_rows + 5, filtered=True
        )
        assert drawn.broken.tolist() == [0, 1, 1, 0]
        assert drawn.tokens[1:3].tolist() == [0, 0]


def test_sampling_values_are_read_again_when_a_row_is_opened() -> None:
    """A steady batch keeps how it draws, but not beyond that."""
    backend, rows = CpuBackend(), rows_with_owners()
    device_rows = torch.tensor([0], dtype=torch.int32)
    logits = torch.zeros(1, VOCAB)

    def drawn() -> set[int]:
        steps = [torch.tensor([i], dtype=torch.int32) for i in range(30)]
        samples = [
            backend.sample(logits, device_rows, rows, positions, filtered=True)
            for positions in steps
        ]
        return {int(sampled.tokens[0]) for sampled in samples}

    assert drawn() == {0}
    rows.open(0, opened(Request(id="new", prompt=(3,), max_tokens=9), (0,)))
    assert len(drawn()) > 10


@pytest.mark.parametrize("which", [0, 1])
def test_a_sampler_draws_what_it_kept_as_it_would_have_at_once(which: int) -> None:
    backend = backends()[which]
    logits = torch.randn(6, VOCAB)
    device_rows = torch.arange(6, dtype=torch.int32)
    positions = device_rows + 9
    needs = SamplingNeeds(filtered=True, scored=True)
    now, later = (Sampler(backend, rows_with_owners(), 8) for _ in range(2))
    now.sample(logits, device_rows, positions, needs)
    later.keep(logits.flip(0), device_rows.flip(0))
    later.sample_kept(device_rows, positions, needs)
    assert later.out.tolist() == now.out.tolist()
    assert later.scores.equal(now.scores)
    assert later.rows.arena.equal(now.rows.arena)
    later.masks.lines[:6] = 0
    later.masks.lines[:6, 0] = 1 << 7
    later.sample_kept(device_rows, positions, needs)
    assert later.out[:6].tolist() == [7] * 6
    exact = logits.log_softmax(-1)[4, 7]
    assert float(later.scores[4, 1, :1].view(torch.float32)) == pytest.approx(
        float(exact)
    )

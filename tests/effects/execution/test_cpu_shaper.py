"""The CPU's shaper agrees with `minfer.sampling.logits`, whatever the batch."""

import random

import pytest
import torch

from minfer.effects.execution.cpu.cpu_backend import CpuBackend
from minfer.effects.execution.device.device_rows import DeviceRows, SamplingNeeds
from minfer.effects.execution.running.sampler import Sampler
from minfer.records.plan import NewRow
from minfer.sampling import reference_sampler as reference
from minfer.sampling.params import SamplingParams
from minfer.sampling.reference_sampler import RowSampling
from tests.effects.execution.shapes import random_row

ROWS = 4


def given(sampling: RowSampling, known_tokens: list[int], prompt: int) -> NewRow:
    return NewRow(0, ("r", 0), tuple(known_tokens), prompt, 10_000, sampling, ((0,),))


class Batch:
    """A sampler on the CPU, and what its rows know."""

    def __init__(self, vocab: int) -> None:
        self.rows = DeviceRows(ROWS, 1, vocab, torch.device("cpu"))
        self.sampler = Sampler(CpuBackend(), self.rows, ROWS)
        self.given: dict[int, tuple[RowSampling, list[int], int]] = {}

    def open(
        self, row: int, sampling: RowSampling, known_tokens: list[int], prompt: int
    ) -> None:
        new_row = given(sampling, known_tokens, prompt)
        self.sampler.open(row, new_row)
        self.given[row] = sampling, list(known_tokens), prompt

    def step(self, rows: list[int], logits: torch.Tensor) -> None:
        device_rows = torch.tensor(rows, dtype=torch.int32)
        known_rows = [self.given[row][1] for row in rows]
        positions = torch.tensor(
            [len(known_tokens) for known_tokens in known_rows], dtype=torch.int32
        )
        needs = self.rows.sampling_needs(rows)
        self.sampler.sample(logits, device_rows, positions, needs)
        drawn = self.sampler.out[: len(rows)].tolist()
        for line, row, token in zip(logits.tolist(), rows, drawn, strict=True):
            sampling, known_tokens, prompt = self.given[row]
            assert token == reference.next_token(line, sampling, known_tokens, prompt)
            known_tokens.append(token)


@pytest.mark.long
@pytest.mark.parametrize("vocab", [9, 60, 300])
def test_tokens_are_those_of_the_reference(vocab: int) -> None:
    """Some 2,000 draws; rows come and go, some of them in the middle of their output."""
    rng = random.Random(vocab)
    generator = torch.Generator().manual_seed(vocab)
    batch = Batch(vocab)
    for turn in range(250):
        for row in range(ROWS):
            if turn == 0 or rng.random() < 0.1:
                length = rng.randrange(1, 40)
                known_tokens = [rng.randrange(vocab) for _ in range(length)]
                prompt = rng.randint(1, length)
                batch.open(row, random_row(rng, vocab), known_tokens, prompt)
        rows = rng.sample(range(ROWS), rng.randint(1, ROWS))
        logits = torch.randn(len(rows), vocab, generator=generator) * rng.choice([1, 6])
        batch.step(rows, logits.round() if rng.random() < 0.3 else logits)


@pytest.mark.long
def test_more_distinct_tokens_than_there_was_room_for() -> None:
    batch, vocab = Batch(400), 400
    sampling = RowSampling.of(SamplingParams(presence_penalty=2, temperature=0), 1, 0)
    batch.open(1, sampling, [5], 1)
    logits = torch.linspace(0, 1, vocab)[None]
    for _ in range(350):
        batch.step([1], logits)
    assert len(set(batch.given[1][1])) == 351


def test_a_batch_without_requested_changes_is_not_shaped() -> None:
    batch = Batch(9)
    plain = RowSampling.of(SamplingParams(), 1, 0)
    penal = RowSampling.of(SamplingParams(presence_penalty=1), 1, 0)
    batch.open(0, plain, [1], 1)
    batch.open(1, penal, [1], 1)
    assert batch.rows.sampling_needs([0]) == SamplingNeeds(False, False, False)
    assert batch.rows.sampling_needs([0, 1]) == SamplingNeeds(False, False, True)
    batch.open(1, plain, [1], 1)
    assert not batch.rows.sampling_needs([0, 1]).shaped


def test_the_models_logits_are_left_as_they_were() -> None:
    batch = Batch(9)
    sampling = RowSampling.of(SamplingParams(logit_bias={2: 5}), 1, 0)
    batch.open(0, sampling, [1], 1)
    logits = torch.zeros(1, 9)
    batch.step([0], logits)
    assert not logits.any()

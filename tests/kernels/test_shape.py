"""Shaped logits on the device against `minfer.sampling.logits`, bit by bit, as tokens
come.
"""

import random

import pytest
import torch
from attrs import evolve

from minfer.effects.execution.cuda.cuda_shaper import CudaShaper
from minfer.effects.execution.device.backend import DrawnTokens
from minfer.effects.execution.device.device_rows import DeviceRows
from minfer.kernels import plain
from minfer.kernels import shape as kernels
from minfer.records.plan import NewRow
from minfer.sampling.logits import f32, is_shaped, shape_logits
from minfer.sampling.params import SamplingParams
from minfer.sampling.reference_sampler import RowSampling
from tests.effects.execution.shapes import random_shape

from .conftest import CUDA

# Infinities are meant: numpy, which is the interpreter, warns of them.
pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered"),
    pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation"),
]
ROWS = 5
REAL = kernels.CHUNK, kernels.BLOCK


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that there are several programs and tiles."""
    monkeypatch.setattr(kernels, "CHUNK", 32)
    monkeypatch.setattr(kernels, "BLOCK", 8)


def opened(how: RowSampling, known: list[int], prompt: int) -> NewRow:
    return NewRow(0, ("r", 0), tuple(known), prompt, 10_000, how, ((0,),))


class Device:
    """Rows of a device, their tokens, and what `minfer.sampling.logits` is given."""

    def __init__(self, vocab: int, device: str, rows: int = ROWS) -> None:
        self.device = torch.device(device)
        self.rows = DeviceRows(rows, 1, vocab, self.device)
        self.shaper = CudaShaper(self.rows, self.device)
        self.given: dict[int, tuple[RowSampling, list[int], int]] = {}

    def open(self, row: int, how: RowSampling, known: list[int], prompt: int) -> None:
        one = opened(how, known, prompt)
        self.rows.open(row, one)
        words = torch.cat([torch.from_numpy(part) for part in self.rows.take()])
        plain.scatter(self.rows.arena, words.to(self.device))
        self.shaper.open(row, one)
        self.given[row] = how, list(known), prompt

    def step(self, rows: list[int], logits: torch.Tensor, tokens: list[int]) -> None:
        """Draw `tokens`: what they are drawn from must be as it is meant."""
        known = [self.given[row][1] for row in rows]
        padding = [self.rows.scratch] * 2
        device_rows = self._ints([*rows, *padding])
        positions = self._ints([*map(len, known), 0, 0])
        found = self.shaper.shape(logits.to(self.device), device_rows, positions)
        assert found.dtype is torch.float32
        for line, row, own in zip(found.tolist(), rows, logits.tolist(), strict=False):
            how, seen, prompt = self.given[row]
            assert line == shape_logits(own, how, seen[:prompt], seen[prompt:])
        assert found[len(rows) :].cpu().equal(logits[len(rows) :].float())
        drawn = DrawnTokens(
            self._ints([*tokens, 1, 2]), self._ints([0] * (len(rows) + 2))
        )
        self.shaper.count(device_rows, positions, drawn)
        for seen, token in zip(known, tokens, strict=True):
            seen.append(token)

    def _ints(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


@pytest.mark.long
@pytest.mark.parametrize("vocab", [7, 64, 101])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_are_what_they_are_meant_to_be(
    device: str, vocab: int, dtype: torch.dtype
) -> None:
    """Rows come and go, some of them in the middle of their output."""
    rng = random.Random(vocab)
    generator = torch.Generator().manual_seed(vocab)
    there = Device(vocab, device)
    for turn in range(12):
        for row in range(ROWS):
            if turn == 0 or rng.random() < 0.15:
                length, prompt = rng.randrange(1, 12), rng.randrange(1, 6)
                known = [rng.randrange(vocab) for _ in range(length)]
                how = random_shape(rng, vocab)
                there.open(row, how, known, min(prompt, length))
        rows = rng.sample(range(ROWS), rng.randint(1, ROWS))
        logits = torch.randn(len(rows) + 2, vocab, generator=generator) * 4
        tokens = [likely(rng, vocab, there.given[row][0]) for row in rows]
        there.step(rows, logits.to(dtype), tokens)


def likely(rng: random.Random, vocab: int, how: RowSampling) -> int:
    """A token; often one that a bad word has."""
    of_words = [token for word in how.bad_words for token in word]
    if of_words and rng.random() < 0.7:
        return rng.choice(of_words)
    return rng.randrange(vocab)


@pytest.mark.long
def test_rows_that_ask_for_nothing_follow_those_that_do(device: str) -> None:
    there = Device(20, device)
    plain_ = RowSampling.of(SamplingParams(), 1, 0)
    all_ = RowSampling.of(
        SamplingParams(
            presence_penalty=1, logit_bias={3: 4}, allowed_token_ids=[3, 4, 5]
        ),
        1,
        0,
        bad_words=((3,), (4, 5)),
    )
    assert is_shaped(all_)
    assert not is_shaped(plain_)
    for how in (all_, plain_, all_, evolve(all_, logit_bias=(), bad_words=())):
        there.open(2, how, [1, 2, 4], 1)
        for _ in range(2):
            there.step([2], torch.randn(3, 20), [4])


@pytest.mark.long
def test_a_bias_and_hiding_of_the_same_token(device: str) -> None:
    """Whatever order a list has."""
    there = Device(40, device)
    how = RowSampling.of(
        SamplingParams(logit_bias=dict.fromkeys(range(30), 7.5), min_tokens=2),
        1,
        0,
        frozenset({5, 29}),
        ((11,), (5,)),
    )
    there.open(0, how, [1, 2], 2)
    for token in (3, 4, 5):
        there.step([0], torch.randn(3, 40), [token])


def test_broken_rows_count_nothing(device: str) -> None:
    there = Device(9, device)
    how = RowSampling.of(SamplingParams(frequency_penalty=1), 1, 0)
    there.open(0, how, [1], 1)
    device_rows, positions, tokens, broken = (there._ints([v]) for v in (0, 1, 4, 1))
    there.shaper.count(device_rows, positions, DrawnTokens(tokens, broken))
    there.step([0], torch.ones(3, 9), [4])
    there.step([0], torch.ones(3, 9), [5])


def test_operations_are_rounded_one_by_one(device: str) -> None:
    """Multiplied and subtracted at once, some of these would differ."""
    there = Device(50, device)
    how = RowSampling.of(
        SamplingParams(
            frequency_penalty=0.7, presence_penalty=-0.3, repetition_penalty=1.1
        ),
        1,
        0,
    )
    known = [t for t in range(50) for _ in range(t % 7)]
    there.open(0, how, known, 3)
    assert f32(0.7) * 3 != f32(f32(0.7) * 3)
    there.step([0], torch.randn(3, 50, generator=torch.Generator().manual_seed(1)), [3])


@pytest.mark.skipif(not CUDA, reason="real vocabularies are for the GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_real_vocabularies(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels and reference, bit by bit, in a CUDA graph, over some tokens."""
    monkeypatch.setattr(kernels, "CHUNK", REAL[0])
    monkeypatch.setattr(kernels, "BLOCK", REAL[1])
    rng, vocab, count = random.Random(4), 151_936, 64
    both = [Device(vocab, "cuda", count) for _ in range(2)]
    for row in range(count):
        how = random_shape(rng, vocab)
        many = tuple((rng.randrange(vocab), rng.randrange(9)) for _ in range(300))
        how = evolve(how, bad_words=(*how.bad_words, *many))
        known = [rng.randrange(vocab) for _ in range(rng.randrange(1, 900))]
        for one in both:
            one.open(row, how, known, len(known) // 2 + 1)
    device_rows = torch.arange(count, device="cuda", dtype=torch.int32).flip(0)
    positions = torch.tensor(
        [len(both[0].given[row][1]) for row in device_rows.tolist()], device="cuda"
    ).int()
    logits = torch.empty(count, vocab, device="cuda", dtype=dtype)
    tokens, fine = torch.zeros_like(device_rows), torch.zeros_like(device_rows)
    drawn = DrawnTokens(tokens, fine)

    def step() -> torch.Tensor:
        made = both[0].shaper.shape(logits, device_rows, positions)
        both[0].shaper.count(device_rows, positions, drawn)
        return made

    logits.normal_(0, 3)
    step()
    both[1].shaper.state.seen.copy_(both[0].shaper.state.seen)
    both[1].shaper.state.matched.copy_(both[0].shaper.state.matched)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    rows = both[1].rows
    penalties = rows.penalties
    for turn in range(6):
        logits.normal_(0, 3)
        tokens.copy_(torch.randint(9 if turn % 2 else vocab, (count,)))
        positions.add_(1)
        kept = both[1].shaper.state
        wanted = kernels.reference(logits, device_rows, positions, penalties, kept)
        kernels.reference_count(device_rows, positions, tokens, fine, kept)
        graph.replay()
        assert torch.equal(found, wanted)
        assert torch.equal(both[0].shaper.state.seen, kept.seen)

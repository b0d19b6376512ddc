"""The device's sampler, token by token, against the reference sampler's `draw`."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from minfer.effects.execution.cpu.cpu_sampler import draw_keys, gumbels
from minfer.kernels import sample as kernels
from minfer.kernels import sample_reference
from minfer.kernels.sample_launches import ProgramSizes
from minfer.kernels.sample_reference import SamplingValues
from minfer.records.request import SamplingParams
from minfer.sampling import reference_sampler as meaning
from tests.circles import claimed

from .conftest import CUDA

# Infinities are meant: numpy, which is the interpreter, warns of them.
pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered"),
    pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation"),
]
REAL = kernels.SIZES
SMALL = [  # a row is many chunks
    ProgramSizes(
        chunk=64,
        group=16,
        span=32,
        block=16,
        tile=64,
        samples=32,
        waits=2,
        max_unguessed=0,
    ),
    ProgramSizes(
        chunk=128,
        group=32,
        span=256,
        block=128,
        tile=256,
        samples=16,
        waits=0.5,
        max_unguessed=20,
    ),
    ProgramSizes(
        chunk=64,
        group=32,
        span=64,
        block=32,
        tile=128,
        samples=64,
        waits=24,
        max_unguessed=1000,
    ),
]
Row = tuple[SamplingParams, int, int, int]  # parameters, seed, sample, position


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    return random.Random(request.node.name)


@pytest.fixture(autouse=True)
def sizes(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SIZES", rng.choice(SMALL))


def signed(bits: int) -> int:
    return bits - 2**64 if bits >= 2**63 else bits


def tensors(
    rows: Sequence[Row], device: str
) -> tuple[Tensor, SamplingValues, Tensor, Tensor]:
    """The arguments of `sample` after the logits; device rows are in the
    reverse order.
    """
    params = [row[0] for row in rows]
    streams = [signed(meaning.stream(seed, number)) for _, seed, number, _ in rows]

    def put(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device).flip(0)

    return (
        put(range(len(rows)), torch.int32),
        SamplingValues(
            put([one.temperature for one in params], torch.float32),
            put([max(one.top_k, 0) for one in params], torch.int32),
            put([one.top_p for one in params], torch.float32),
            put([-meaning.lowest(one.min_p) for one in params], torch.float32),
            put([one.typical_p for one in params], torch.float32),
        ),
        put(streams, torch.int64),
        put([position for *_, position in rows], torch.int64).flip(0),
    )


def drawn(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    return [
        meaning.draw(line, *row)
        for line, row in zip(logits.float().tolist(), rows, strict=True)
    ]


def rows_of(rng: random.Random, params: Sequence[SamplingParams]) -> list[Row]:
    far = [0, 1, 2**32, 2**40]
    return [
        (
            one,
            rng.randrange(-(2**63), 2**63),
            rng.randrange(3),
            rng.choice(far) + rng.randrange(99),
        )
        for one in params
    ]


def some_logits(rng: random.Random, rows: int, vocab: int) -> Iterator[Tensor]:
    """Plain, in half precision, with many ties, mostly impossible, and with a runaway
    maximum.
    """
    draw = torch.Generator().manual_seed(rng.randrange(2**40))
    plain = torch.randn(rows, vocab, generator=draw) * rng.choice([0.3, 3.0, 8.0])
    hidden = torch.rand(rows, vocab, generator=draw) < 0.7
    hidden[:, rng.randrange(vocab)] = False
    yield plain
    yield plain.half()
    yield (plain / 2).round()
    yield plain.masked_fill(hidden, -math.inf)
    runaway = plain.clone()
    runaway[:, rng.randrange(vocab)] += 1e5
    yield runaway


def check(
    logits: Tensor, rows: Sequence[Row], device: str, filtered: bool = True
) -> None:
    tokens, broken = kernels.sample(
        logits.to(device), *tensors(rows, device), filtered=filtered
    )
    assert not broken.any()
    assert tokens.tolist() == drawn(logits, rows)


def test_numbers_are_those_of_the_core() -> None:
    assert sample_reference.STEPS64 == meaning.MIX64
    assert sample_reference.STEPS32 == meaning.MIX32
    assert sample_reference.GOLDEN == meaning.GOLDEN
    assert sample_reference.LARGEST_V == meaning.LARGEST_V
    assert sample_reference.GREEDY_BELOW == meaning.GREEDY_BELOW


@pytest.mark.long
@pytest.mark.parametrize("vocab", [1, 2, 63, 64, 300])
def test_draws_from_all_tokens(device: str, rng: random.Random, vocab: int) -> None:
    for logits in some_logits(rng, 4, vocab):
        params = [SamplingParams(temperature=t) for t in (0.0, 0.1, 1.0, 7.0)]
        check(logits, rows_of(rng, params), device, filtered=False)


def drawn_by_parts(
    logits: Tensor, rows: Sequence[Row], ranks: int, device: str
) -> list[tuple[Tensor, Tensor]]:
    """What each rank returns that has a part of the logits. Columns behind the vocabulary
    are as large as the largest others.
    """
    count, vocab = logits.shape
    chunk = kernels.SIZES.chunk
    width = -(-vocab // (ranks * chunk)) * chunk
    largest = logits.nan_to_num(0, 0, 0).amax(1, True)
    whole = torch.cat((logits, largest.expand(count, ranks * width - vocab)), 1)
    sent = list[Tensor]()
    arguments = tensors(rows, device)

    def on_rank(rank: int, exchange: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        found = kernels.sample_divided(
            whole[:, rank * width : (rank + 1) * width].contiguous().to(device),
            *arguments,
            vocab=vocab,
            first=rank * width,
            exchange=exchange,
        )
        assert found is not None
        return found

    def send(own: Tensor) -> Tensor:
        sent.append(own.clone())
        return own

    for rank in range(ranks):
        on_rank(rank, send)
    # Columns of ranks need not be side by side in memory.
    everything = torch.cat([one.t() for one in sent]).t()
    return [on_rank(rank, lambda _: everything) for rank in range(ranks)]


# The last rank has a part of its columns, all of them, or none.
@pytest.mark.long
@pytest.mark.parametrize(("ranks", "vocab"), [(2, 100), (2, 300), (3, 300), (4, 270)])
def test_parts_of_ranks_draw_what_whole_logits_draw(
    ranks: int, vocab: int, rng: random.Random
) -> None:
    device = "cuda" if CUDA else "cpu"
    for logits in some_logits(rng, 5, vocab):
        logits[3, rng.randrange(vocab)] = rng.choice([math.nan, math.inf])
        logits[4] = -math.inf
        params = [SamplingParams(temperature=t) for t in (0.0, 0.2, 1.0, 1.0, 1.0)]
        rows = rows_of(rng, params)
        arguments = tensors(rows, device)
        wanted = kernels.sample(logits.to(device), *arguments, filtered=False)
        for tokens, broken in drawn_by_parts(logits, rows, ranks, device):
            assert tokens.equal(wanted[0])
            assert broken.equal(wanted[1])
            assert broken.tolist() == [0, 0, 0, 1, 1]


@pytest.mark.long
def test_of_equal_tokens_of_two_ranks_the_lowest_id_is_drawn(rng: random.Random) -> None:
    logits = torch.zeros(1, 256)
    logits[0, [70, 127, 128, 255]] = 2.0
    rows = rows_of(rng, [SamplingParams(temperature=0.0)])
    device = "cuda" if CUDA else "cpu"
    for tokens, _ in drawn_by_parts(logits, rows, 2, device):
        assert tokens.tolist() == [70]
    logits[0, :128] = 0.0
    for tokens, _ in drawn_by_parts(logits, rows, 2, device):
        assert tokens.tolist() == [128]


@pytest.mark.skipif(not CUDA, reason="real vocabularies are for the GPU")
@pytest.mark.parametrize("ranks", [2, 8])
def test_parts_of_real_vocabularies(
    ranks: int, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "SIZES", REAL)
    for vocab in (151_936, 128_256, 32_001):
        logits = (2 * torch.randn(300, vocab, device="cuda")).bfloat16()
        temperatures = [rng.choice([0.0, 0.6, 1.0]) for _ in range(300)]
        rows = rows_of(rng, [SamplingParams(temperature=t) for t in temperatures])
        wanted, _ = kernels.sample(logits, *tensors(rows, "cuda"), filtered=False)
        for tokens, _ in drawn_by_parts(logits.cpu(), rows, ranks, "cuda"):
            assert tokens.equal(wanted)


def test_what_cannot_be_drawn_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    def part(columns: int) -> object:
        return kernels.sample_divided(
            torch.zeros(1, columns),
            *tensors([(SamplingParams(), 0, 0, 0)], "cpu"),
            vocab=columns,
            first=0,
            exchange=lambda own: own,
        )

    assert part(kernels.SIZES.chunk + 16) is None
    monkeypatch.setattr("minfer.kernels.interpreting", False)
    assert part(kernels.SIZES.chunk) is None


@pytest.mark.long
@pytest.mark.parametrize("vocab", [5, 190, *claimed([1, 64])])
def test_draws_from_some_tokens(device: str, rng: random.Random, vocab: int) -> None:
    """Each call mixes greedy, free and restricted rows, some of them doubly and more."""
    for logits in some_logits(rng, 6, vocab):
        heat, k = rng.choice([0.3, 1.0, 4.0]), rng.choice([1, 2, 20, 1000])
        p, least = (
            rng.choice([0.01, 0.5, 0.9, 0.999]),
            rng.choice([1e-9, 0.01, 0.2, 0.9, 1.0]),
        )
        params = [
            SamplingParams(
                temperature=heat, top_k=k, top_p=p if rng.random() < 0.5 else 1.0
            ),
            SamplingParams(temperature=heat, top_p=p),
            SamplingParams(temperature=heat),
            SamplingParams(temperature=0.0, top_k=k, top_p=p, min_p=least),
            SamplingParams(temperature=heat, min_p=least),
            SamplingParams(
                temperature=heat,
                min_p=least,
                top_k=rng.choice([0, k]),
                top_p=rng.choice([1.0, p]),
            ),
        ]
        check(logits, rows_of(rng, params), device)


@pytest.mark.long
@pytest.mark.parametrize("vocab", [5, 190, *claimed([1, 64])])
def test_draws_from_typical_tokens(device: str, rng: random.Random, vocab: int) -> None:
    """Each call mixes rows restricted by typical-p alone, and by others as well."""
    for logits in some_logits(rng, 6, vocab):
        heat, k = rng.choice([0.3, 1.0, 4.0]), rng.choice([1, 2, 20, 1000])
        p, share = rng.choice([0.5, 0.9, 0.999]), rng.choice([0.05, 0.5, 0.9, 0.999])
        params = [
            SamplingParams(temperature=heat, typical_p=share),
            SamplingParams(temperature=heat, typical_p=share, top_p=p),
            SamplingParams(temperature=heat, typical_p=share, top_k=k),
            SamplingParams(temperature=0.0, typical_p=share, top_p=p),
            SamplingParams(temperature=heat, typical_p=share, min_p=0.05),
            SamplingParams(
                temperature=heat, typical_p=share, min_p=0.01, top_k=k, top_p=p
            ),
        ]
        check(logits, rows_of(rng, params), device)


@pytest.mark.long
def test_ties_at_the_edges(device: str, rng: random.Random) -> None:
    """Top-k keeps all of the tokens that tie at its edge, top-p the lowest ids among
    them.
    """
    logits = torch.tensor([[0.0, 1.0, -0.0, 1.0, 0.0, -1.0] * 15] * 9)
    params = [
        SamplingParams(temperature=5.0, top_k=20),
        SamplingParams(temperature=5.0, top_k=40),
        SamplingParams(temperature=5.0, top_p=0.1),
        SamplingParams(temperature=5.0, top_p=0.6),
        SamplingParams(temperature=5.0, top_k=40, top_p=0.9),
        SamplingParams(temperature=5.0, min_p=1.0),
        SamplingParams(temperature=5.0, min_p=0.7, top_k=85),
        SamplingParams(temperature=5.0, min_p=0.7, top_p=0.9),
        SamplingParams(temperature=5.0, min_p=0.9, top_k=85, top_p=0.9),
    ]
    check(logits[: len(params)], rows_of(rng, params), device)
    level = torch.tensor([[0.0, -0.0] * 45] * len(params))
    check(level, rows_of(rng, params), device)
    some = [SamplingParams(top_p=0.6)] * len(params)
    check(-level, rows_of(rng, some), device)  # the maximum may be the negative zero
    scaled = torch.tensor(
        [[1.0, 1.0 + 2**-23, 1.0 + 2**-22, 0.0]]
    )  # equal once divided by 100
    check(scaled, rows_of(rng, [SamplingParams(temperature=100.0, top_k=1)]), device)


def at_the_edge(line: Tensor, params: SamplingParams) -> Iterator[Row]:
    """Rows that draw the last token kept, and would draw the first left out if it were
    kept.
    """
    scaled = (line - line.max()) / params.temperature
    falling = scaled.sort(descending=True, stable=True).indices.numpy().astype(np.uint32)
    how = params.top_k, params.top_p, params.min_p
    count = len(meaning.filter_tokens(scaled.tolist(), *how))
    keys: Any = draw_keys(np.array([meaning.stream(7, 0)], np.uint64), np.arange(1 << 17))
    for ids in {
        count: falling[:count],
        min(count + 1, len(line)): falling[: count + 1],
    }.values():
        likely = gumbels(keys, ids[-1:]).argsort()[
            :-1000:-1
        ]  # positions where it does best
        scores = scaled.numpy()[ids] + gumbels(keys[likely, None], ids)
        wins = scores.argmax(1) == len(ids) - 1
        assert wins.any()
        yield params, 7, 0, int(likely[wins.argmax()])


def check_edges(line: Tensor, params: Sequence[SamplingParams], device: str) -> None:
    rows = [row for one in params for row in at_the_edge(line, one)]
    check(line.expand(len(rows), -1), rows, device)


@pytest.mark.long
@pytest.mark.parametrize(
    ("order", "each"), [("mixed", 2), *claimed([("mixed", 1), ("sorted", 1)])]
)
def test_the_last_token_kept_and_the_first_left_out(
    device: str, order: str, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all ways to filter, or each second, which have every pair of values."""
    sizes = ProgramSizes(
        chunk=128,
        group=16,
        span=128,
        block=64,
        tile=512,
        samples=64,
        waits=24,
        max_unguessed=0,
    )
    monkeypatch.setattr(kernels, "SIZES", sizes)
    line = torch.randn(300, generator=torch.Generator().manual_seed(3))
    params = [
        SamplingParams(top_k=k, top_p=p, min_p=least)
        for k in (0, 20, 250)
        for p in (1.0, 0.5, 0.9)
        for least in (0.0, 0.01, 0.2)
    ]
    params = params[::each]
    check_edges(line if order == "mixed" else line.sort().values, params, device)


@pytest.mark.long
def test_masses_that_meet_top_p_exactly(device: str) -> None:
    params = [SamplingParams(top_p=0.5), SamplingParams(top_p=0.25)]
    check_edges(torch.zeros(90), params, device)


@pytest.mark.long
def test_ids_beyond_16_bits_at_the_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SIZES", REAL)
    keys = draw_keys(np.array([meaning.stream(7, 0)], np.uint64), np.arange(1000))
    ids = np.arange(first := 65_000, 67_200, dtype=np.uint32)
    winners = (first + int(gumbels(key, ids).argmax()) for key in keys.tolist())
    position = next(i for i, token in enumerate(winners) if token > 1 << 16)
    logits = torch.full((1, 70_000), -40.0, device="cuda" if CUDA else "cpu")
    logits[:, first:] = 0.0  # of 5,000, kept are the first 2,200
    row = SamplingParams(top_p=0.44), 7, 0, position
    arguments = tensors([row], str(logits.device))
    tokens, _ = kernels.sample(logits, *arguments)
    assert 1 << 16 < int(tokens) < 67_200
    assert torch.equal(tokens, kernels.reference(logits, *arguments)[0])


@pytest.mark.long
def test_a_flat_tail_below_a_peak(device: str, rng: random.Random) -> None:
    """The lowest quarter of the tail's ids is kept, by the narrowest margin over the
    bound.
    """
    logits = torch.full((6, 161), -2.0)
    logits[:, 80] = 0.0
    tail = 160 * math.exp(-2)
    top_p = (1 + tail / 4) / (1 + tail)
    check(logits, rows_of(rng, [SamplingParams(top_p=top_p)] * 6), device)


@pytest.mark.long
def test_the_lowest_id_of_the_largest_logits(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # More chunks than a tile holds.
    monkeypatch.setattr(
        kernels,
        "SIZES",
        ProgramSizes(
            chunk=16,
            group=8,
            span=32,
            block=16,
            tile=8,
            samples=8,
            waits=24,
            max_unguessed=0,
        ),
    )
    logits = torch.full((3, 200), -5.0)
    for row, ids in enumerate([(199, 70, 71), (0, 199), (130, 131)]):
        logits[row, list(ids)] = 3.0
    greedy = [(SamplingParams(temperature=0.0), 0, 0, 0)] * 3
    check(logits, greedy, device)
    check(logits - 3, greedy, device)  # zeros
    check(-logits.abs() * 1e38, greedy, device)


@pytest.mark.long
def test_a_broken_row_is_reported_and_harms_no_other(
    device: str, rng: random.Random
) -> None:
    bad = [math.nan, math.inf, -math.inf]
    plain = torch.randn(2, 150)
    lines = [plain[0], *(plain[0].clone() for _ in bad), plain[1]]
    lines[1][149], lines[2][70], lines[3][:] = bad
    for how in (
        SamplingParams(temperature=0.0),
        SamplingParams(),
        SamplingParams(top_k=3, top_p=0.9),
    ):
        rows = rows_of(rng, [how] * 5)
        tokens, broken = kernels.sample(
            torch.stack(lines).to(device), *tensors(rows, device)
        )
        assert broken.tolist() == [0, 1, 1, 1, 0]
        assert tokens[1:4].tolist() == [0, 0, 0]
        assert tokens[::4].tolist() == drawn(plain, rows[::4])


@pytest.mark.long
def test_a_row_does_not_depend_on_its_neighbours(device: str, rng: random.Random) -> None:
    logits = torch.randn(5, 170).to(device)
    how = [SamplingParams(), SamplingParams(top_k=5), SamplingParams(top_p=0.8)]
    rows = rows_of(rng, [how[i % 3] for i in range(5)])
    together, _ = kernels.sample(logits, *tensors(rows, device))
    for i in (3, 1):
        solo, _ = kernels.sample(logits[i : i + 1], *tensors(rows[i : i + 1], device))
        assert solo[0] == together[i]


@pytest.mark.long
def test_rows_may_have_gaps(device: str, rng: random.Random) -> None:
    wide = torch.randn(2, 300)
    check(
        wide[:, 20:200], rows_of(rng, [SamplingParams(), SamplingParams(top_k=9)]), device
    )


def test_no_rows_and_too_long_rows(device: str) -> None:
    tokens, broken = kernels.sample(
        torch.empty(0, 9, device=device), *tensors([], device)
    )
    assert tokens.shape == broken.shape == (0,)
    with pytest.raises(ValueError, match="1048577 logits"):
        kernels.sample(torch.empty(1, 2**20 + 1, device=device), *tensors([], device))


@pytest.mark.skipif(not CUDA, reason="real vocabularies are for the GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("spread", [0.0, 0.5, 2.5])
def test_real_vocabularies(
    dtype: torch.dtype, spread: float, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "SIZES", REAL)
    wrong = total = 0
    for vocab in (151_936, 128_256, 32_001):
        logits = (spread * torch.randn(64, vocab, device="cuda")).to(dtype)
        choices = [(0, 1.0), (50, 1.0), (0, 0.95), (20, 0.8), (3000, 0.99)]
        params = [
            SamplingParams(
                temperature=rng.choice([0.0, 0.6, 1.0]),
                top_k=k,
                top_p=p,
                min_p=rng.choice([0.0, 0.0, 0.001, 0.2]),
            )
            for k, p in (rng.choice(choices) for _ in range(64))
        ]
        arguments = tensors(rows_of(rng, params), "cuda")
        tokens, broken = kernels.sample(logits, *arguments)
        assert not broken.any()
        again, _ = kernels.sample(logits, *arguments)
        assert torch.equal(tokens, again), "a race shows"
        expected, _ = kernels.reference(logits, *arguments)
        wrong += int((tokens != expected).sum())
        total += 64
    assert wrong <= 1, f"{wrong} of {total}"  # logarithms differ in their last bits


@pytest.mark.skipif(not CUDA, reason="CUDA graphs")
def test_in_a_cuda_graph(rng: random.Random) -> None:
    logits = torch.randn(4, 5000, device="cuda")
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(),
        SamplingParams(top_k=7, top_p=0.9),
    ]
    arguments = tensors(rows_of(rng, [*params, SamplingParams(top_p=0.7)]), "cuda")
    kernels.sample(logits, *arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, broken = kernels.sample(logits, *arguments)
    for _ in range(3):
        logits.copy_(torch.randn(4, 5000))
        arguments[-1].add_(1)
        graph.replay()
        expected, fine = kernels.sample(logits, *arguments)
        assert torch.equal(tokens, expected)
        assert torch.equal(broken, fine)

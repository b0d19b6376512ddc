"""The token in a draft's place, against `minfer.speculate.rejection`, row by row."""

import math
import random
from collections.abc import Sequence

import pytest
import torch
from attrs import define, evolve
from torch import Tensor

from minfer.effects.models.layout import shapes
from minfer.kernels import reject
from minfer.kernels.sample_reference import SamplingValues, reference
from minfer.sampling.params import SamplingParams
from minfer.sampling.reference_sampler import RowSampling, lowest, scores
from minfer.speculate.rejection import (
    Chances,
    Streams,
    accept_or_replace,
    chances,
    sample_draft,
)
from tests.circles import claimed
from tests.core.sampling.test_reference_sampler import chi_square, critical

from .conftest import CUDA
from .test_sample import signed, some_logits

WAYS = (
    SamplingParams(),
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=3, top_k=5),
    SamplingParams(temperature=1.3, top_p=0.8),
    SamplingParams(min_p=0.1),
    SamplingParams(typical_p=0.7),
    SamplingParams(top_k=40, top_p=0.95, min_p=0.01, typical_p=0.9),
)
PLAIN = WAYS[:3]


@define
class Case:
    """A row with a draft."""

    how: RowSampling
    position: int
    draft: int
    p: list[float]  # logits
    q: list[float]
    given: bool

    @classmethod
    def make(
        cls, rng: random.Random, how: SamplingParams, p: list[float], q: list[float]
    ) -> "Case":
        row = RowSampling.of(how, rng.getrandbits(64), rng.randrange(3))
        position, given = rng.randrange(2**20), rng.random() < 0.5
        streams = Streams.of(row.seed, row.sample)
        draft = sample_draft(q, row, [0] * position, position, streams).token
        if given and rng.random() < 0.7:
            draft = rng.randrange(len(p))
        return cls(row, position, draft, p, q, given)

    @property
    def token(self) -> int:
        """By the definition."""
        p = chances(scores(self.p, self.how))
        q: Chances = {self.draft: 1.0}
        if not self.given:
            q = chances(scores(self.q, self.how))
        streams = Streams.of(self.how.seed, self.how.sample)
        return accept_or_replace(self.draft, p, q, streams, self.position)


def rejected(cases: Sequence[Case], device: str, *, filtered: bool) -> list[int]:
    """All of them at once."""

    def put(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)[:, None]

    rows = [case.how for case in cases]
    streams = [Streams.of(row.seed, row.sample) for row in rows]
    some = any(not case.given for case in cases)
    tokens = reject.reject(
        torch.tensor([case.p for case in cases], device=device),
        SamplingValues(
            put([row.temperature for row in rows], torch.float32),
            put([row.top_k for row in rows], torch.int32),
            put([row.top_p for row in rows], torch.float32),
            put([-lowest(row.min_p) for row in rows], torch.float32),
            put([row.typical_p for row in rows], torch.float32),
        ),
        reject.RejectionNoise(
            put([signed(one.picks) for one in streams], torch.int64),
            put([signed(one.coins) for one in streams], torch.int64),
            put([case.position for case in cases], torch.int64),
        ),
        reject.RowDrafts(
            put([case.draft for case in cases], torch.int32),
            put([case.given for case in cases], torch.bool),
            torch.tensor([case.q for case in cases], device=device) if some else None,
        ),
        filtered=filtered,
    )
    found: list[int] = tokens[:, 0].tolist()
    return found


@pytest.mark.long
@pytest.mark.parametrize("vocab", [1, 2, 7, 200, *claimed([3000])])
@pytest.mark.parametrize("seed", [0, *claimed([1, 2, 3])])
@pytest.mark.parametrize("ways", [PLAIN, WAYS], ids=["plain", "filtered"])
def test_as_the_pure_rule_says(
    device: str, ways: tuple[SamplingParams, ...], seed: int, vocab: int
) -> None:
    rng, stood, changed = random.Random(f"{seed} {vocab}"), 0, 0
    count = 4 * len(ways) + 3
    for lines in some_logits(rng, 2 * count, vocab):
        p, q = lines[:count].tolist(), lines[count:].tolist()
        if rng.random() < 0.7:  # near each other
            q = [
                [0.8 * a + 0.2 * b for a, b in zip(*two, strict=True)]
                for two in zip(p, q, strict=True)
            ]
        cases = [
            Case.make(rng, ways[i % len(ways)], *each)
            for i, each in enumerate(zip(p, q, strict=True))
        ]
        due = [case.token for case in cases]
        assert rejected(cases, device, filtered=ways is WAYS) == due
        stand = [case.draft == token for case, token in zip(cases, due, strict=True)]
        stood, changed = stood + sum(stand), changed + len(stand) - sum(stand)
    assert stood > count / 2
    assert changed > count / 2 or vocab < 3


@pytest.mark.parametrize("at_once", [1, 5])
def test_how_many_are_worked_on_at_once_does_not_matter(
    device: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(at_once)
    lines = torch.randn(24, 50, generator=torch.Generator().manual_seed(1)).tolist()
    cases = [
        Case.make(rng, WAYS[i % len(WAYS)], *each)
        for i, each in enumerate(zip(lines[:12], lines[12:], strict=True))
    ]
    monkeypatch.setattr(reject, "ROWS_AT_ONCE", at_once)
    assert rejected(cases, device, filtered=True) == [case.token for case in cases]


HOW = RowSampling(seed=0, sample=0)
P = [0.5, -0.3, 1.0, 0.2]


def tokens_of(case: Case, device: str, seeds: int = 300) -> list[int]:
    """What one case comes to, by several seeds."""
    cases = [evolve(case, how=evolve(case.how, seed=seed)) for seed in range(seeds)]
    return rejected(cases, device, filtered=False)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_draft_of_logits_that_are_not_finite_is_certain(
    device: str, bad: float
) -> None:
    """Token 0, as draws are there."""
    broken = [bad] * 4 if bad < 0 else [0.1, bad, 0.2, 0.3]
    case = Case(HOW, 9, 0, P, broken, given=False)
    found = tokens_of(case, device)
    assert found == tokens_of(evolve(case, given=True), device)
    assert set(found) == {0, 1, 2, 3}


def test_ids_that_the_draft_model_lacks_are_left_of_the_targets(device: str) -> None:
    case = Case(HOW, 9, 0, P, [3.0, 1.0, -math.inf, -math.inf], given=False)
    assert set(tokens_of(case, device)) == {0, 2, 3}


def test_an_id_that_the_target_lacks_is_rejected(device: str) -> None:
    found = tokens_of(Case(HOW, 9, len(P), P, P, given=True), device)
    assert set(found) == {0, 1, 2, 3}


@pytest.mark.long
def test_equal_distributions_accept_every_draft(device: str) -> None:
    for draft in range(len(P)):
        case = Case(HOW, 9, draft, P, P, given=False)
        assert tokens_of(case, device) == [draft] * 300


def test_where_nothing_is_left_the_targets_is_drawn_from(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As roundings might have it: nothing has more than its q, and a draft has less."""
    p, q = [0.5, 0.25, 0.25, 0.0], [0.5, 0.25, 0.25, 1e-8]
    lines = {0.0: torch.tensor([p], device=device), 1.0: torch.tensor([q], device=device)}
    monkeypatch.setattr(
        reject,
        "probabilities",
        lambda x, *_, **__: lines[float(x[0, 0])].repeat(len(x), 1),
    )
    case = Case(HOW, 9, 3, [0.0] * 4, [1.0] * 4, given=False)
    streams = [Streams.of(seed, 0) for seed in range(300)]
    exact: Chances = dict(enumerate(p))
    due = [accept_or_replace(3, exact, dict(enumerate(q)), one, 9) for one in streams]
    assert tokens_of(case, device) == due
    assert set(due) == {0, 1, 2}


def test_nothing_depends_on_values() -> None:
    """So it can be captured: what is nowhere has none."""
    empty = torch.empty(20, 1, device="meta")
    ids, logits = empty.long(), torch.empty(20, 33, device="meta")
    found = reject._reject(
        logits,
        SamplingValues(empty, ids.int(), empty, empty, empty),
        reject.RejectionNoise(ids, ids, ids),
        reject.RowDrafts(ids.int(), empty > 0, logits),
        filtered=True,
    )
    assert (found.shape, found.dtype) == ((20, 1), torch.int32)


def test_the_memory_plan_knows_what_it_takes() -> None:
    assert shapes.REJECTION_BYTES_PER_ID == reject.ROWS_AT_ONCE * reject.BYTES_PER_TOKEN


# What a draft is drawn from, where noise that is used twice shows most; coins are the
# noise of the first token.
FLAT = (0.3, 0.1, 0.3, 0.3)
FAR, NEARER = (0.005, 0.9, 0.09, 0.005), (0.6, 0.2, 0.1, 0.1)


def chi_of(
    device: str, count: int, drawn_from: tuple[float, ...], shared: str = ""
) -> float:
    """Of what so many rows draw, each by its own seed and a draft of its own; `shared`
    names two streams that are made one.
    """
    streams = [Streams.of(seed, 0) for seed in range(count)]
    if shared:
        one, other = shared.split()
        streams = [evolve(each, **{one: getattr(each, other)}) for each in streams]
    noise = {
        name: torch.tensor([signed(getattr(one, name)) for one in streams], device=device)
        for name in ("draft", "picks", "coins")
    }
    p, q = (
        torch.tensor(some, device=device).log().repeat(count, 1)
        for some in (FLAT, drawn_from)
    )
    rows = torch.arange(count, device=device, dtype=torch.int32)
    ones, all_, at = torch.ones_like(p[:, 0]), torch.zeros_like(rows), rows * 0 + 77
    far = ones * torch.inf
    values = SamplingValues(ones, all_, ones, far, ones)
    drafts, _ = reference(q, rows, values, noise["draft"], at)
    found = reject.reject(
        p,
        values.of_rows(rows.long()),
        reject.RejectionNoise(
            noise["picks"][:, None], noise["coins"][:, None], at[:, None].long()
        ),
        reject.RowDrafts(drafts[:, None], rows[:, None] < 0, q),
        filtered=False,
    )
    seen = found[:, 0].bincount(minlength=4).tolist()
    return chi_square(seen, [count * share for share in FLAT])


@pytest.mark.parametrize("count", [6000, *claimed([200_000])])
def test_tokens_have_the_distribution_of_the_target(
    device: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reject, "ROWS_AT_ONCE", count)
    assert chi_of(device, count, FAR) < critical(3)
    assert chi_of(device, count, NEARER) < critical(3)


@pytest.mark.long
@pytest.mark.parametrize(
    ("shared", "drawn_from"),
    [("coins draft", NEARER), ("picks draft", FAR), ("picks coins", FAR)],
)
def test_a_shared_stream_is_noticed(
    device: str,
    shared: str,
    drawn_from: tuple[float, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reject, "ROWS_AT_ONCE", 6000)
    assert chi_of(device, 6000, drawn_from, shared) > 1.5 * critical(3)


@pytest.mark.skipif(not CUDA, reason="CUDA graphs")
def test_in_a_cuda_graph() -> None:
    column, device = torch.ones(20, 1, device="cuda"), torch.device("cuda")
    p, q = torch.randn(2, 20, 5000, device=device).unbind(0)
    ids = torch.arange(20, device=device)[:, None]
    ways = SamplingValues(
        column, (column * 900).int(), column * 0.9, column * 9, column * 0.95
    )
    noise = reject.RejectionNoise(ids + 5, ids + 50, ids)
    drafts = reject.RowDrafts(ids.int(), ids % 2 > 0, q)
    reject.reject(p, ways, noise, drafts, filtered=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = reject.reject(p, ways, noise, drafts, filtered=True)
    for _ in range(3):
        p.copy_(torch.randn(20, 5000))
        noise.positions.add_(1)
        graph.replay()
        due = reject.reject(p, ways, noise, drafts, filtered=True)
        assert torch.equal(found, due)

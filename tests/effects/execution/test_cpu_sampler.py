"""The batch sampler agrees with the reference, whatever the batch."""

import math
import random
from collections import Counter

import numpy as np
import pytest
import torch

from minfer.effects.execution.cpu.cpu_sampler import (
    Sampling,
    choose,
    draw_keys,
    gumbels,
    kept_ids,
    noise_bits,
)
from minfer.records.request import SamplingParams
from minfer.sampling import reference_sampler as reference
from minfer.sampling.reference_sampler import RowSampling

How = tuple[SamplingParams, int, int]  # parameters, seed, sample


def random_how(rng: random.Random) -> How:
    params = SamplingParams(
        temperature=rng.choice([0, 1e-5, 0.3, 0.7, 1.0, 2.0]),
        top_k=rng.choice([0, 0, -1, 1, 2, 5, 40, 10_000]),
        top_p=rng.choice([1.0, 1.0, 0.999, 0.9, 0.5, 0.1, 1e-9]),
        min_p=rng.choice([0.0, 0.0, 1e-6, 0.01, 0.3, 1.0]),
    )
    return params, rng.randrange(-(2**63), 2**63), rng.randrange(4)


def rows_of(hows: list[How]) -> list[RowSampling]:
    return [RowSampling.of(*sampling) for sampling in hows]


def random_logits(rng: random.Random, rows: int, vocab: int) -> torch.Tensor:
    logits = torch.randn(
        rows, vocab, generator=torch.Generator().manual_seed(rng.randrange(2**31))
    )
    logits *= rng.choice([0.3, 3.0, 20.0])
    if rng.random() < 0.4:
        logits.round_()  # ties
    if rng.random() < 0.3 and vocab > 1:
        logits[:, rng.randrange(vocab)] = -math.inf  # a masked token
    return logits


@pytest.mark.long
@pytest.mark.parametrize("vocab", [1, 2, 7, 50, 400])
def test_tokens_are_those_of_the_reference(vocab: int) -> None:
    rng = random.Random(vocab)
    for _ in range(150):
        logits = random_logits(rng, 4, vocab)
        hows = [random_how(rng) for _ in range(4)]
        positions = np.array([rng.randrange(1, 5000) for _ in range(4)])
        choice = choose(logits, Sampling.of(rows_of(hows), vocab), positions)
        assert not choice.broken
        assert choice.tokens.tolist() == [
            reference.draw(row, *sampling, position)
            for row, sampling, position in zip(
                logits.tolist(), hows, positions.tolist(), strict=True
            )
        ]


def test_filters_are_those_of_the_reference_on_a_large_vocabulary() -> None:
    rng = random.Random(1)
    for _ in range(12):
        scaled = random_logits(rng, 1, 5000)[0]
        scaled -= scaled.max()
        top_k, top_p = (
            rng.choice([0, 3, 700]),
            float(np.float32(rng.choice([0.3, 0.9, 0.9999]))),
        )
        min_p = rng.choice([0.0, 0.001, 0.4])
        kept = kept_ids(scaled.numpy(), top_k, top_p, reference.lowest(min_p)).tolist()
        assert kept == reference.filter_tokens(scaled.tolist(), top_k, top_p, min_p)


def test_the_integers_are_exactly_those_of_the_reference() -> None:
    rng = random.Random(2)
    for _ in range(50):
        seed, sample = rng.randrange(-(2**63), 2**63), rng.randrange(128)
        position, first = rng.randrange(2**31), rng.randrange(2**31)
        stream = reference.stream(seed, sample)
        key = reference.draw_key(stream, position)
        assert draw_keys(
            np.array([stream], np.uint64), np.array([position])
        ).tolist() == [key]
        ids = np.arange(first, first + 100).astype(np.uint32)
        expected = [reference.noise_bits(key, token) for token in ids.tolist()]
        assert noise_bits(key, ids).tolist() == expected
        noise = [reference.gumbel(bits) for bits in expected]
        np.testing.assert_allclose(gumbels(key, ids), noise, rtol=1e-6, atol=1e-6)


def test_a_draw_does_not_depend_on_the_batch() -> None:
    rng = random.Random(3)
    hows = [random_how(rng) for _ in range(40)]
    logits, positions = random_logits(rng, 40, 300), np.arange(40) * 7 + 1
    together = choose(logits, Sampling.of(rows_of(hows), 300), positions).tokens
    for order in (list(range(40))[::-1], rng.sample(range(40), 25), [11]):
        sampling = Sampling.of(rows_of([hows[i] for i in order]), 300)
        tokens = choose(logits[order], sampling, positions[order]).tokens
        assert tokens.tolist() == together[order].tolist()


@pytest.mark.long
@pytest.mark.parametrize("top_p", [1.0, 0.8])
@pytest.mark.parametrize("top_k", [0, 5])
def test_draws_have_the_distribution_of_the_softmax(top_k: int, top_p: float) -> None:
    count, vocab = 20_000, 12
    logits = torch.linspace(-2, 2, vocab)[
        torch.randperm(vocab, generator=torch.manual_seed(0))
    ]
    params = SamplingParams(temperature=0.9, top_k=top_k, top_p=top_p)
    ids = reference.filter_tokens([x / 0.9 for x in logits.tolist()], top_k, top_p)
    sampling = Sampling.of(
        [RowSampling.of(params, seed, 0) for seed in range(count)], vocab
    )
    drawn = Counter(
        choose(logits.expand(count, -1), sampling, np.full(count, 9)).tokens.tolist()
    )
    assert set(drawn) == set(ids)
    expected = (torch.softmax(logits[ids] / 0.9, 0) * count).tolist()
    chi = sum((drawn[t] - e) ** 2 / e for t, e in zip(ids, expected, strict=True))
    freedom = len(ids) - 1
    assert chi < freedom + 4 * math.sqrt(2 * freedom) + 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_without_finite_logits_are_named_and_harm_no_other(
    bad: float, temperature: float
) -> None:
    rng = random.Random(4)
    hows = [(SamplingParams(temperature=temperature, top_p=0.9), i, 0) for i in range(5)]
    logits, positions = random_logits(rng, 5, 100), np.arange(5)
    good = choose(logits, Sampling.of(rows_of(hows), 100), positions)
    assert good.broken == ()
    logits[1, 17] = bad
    logits[3] = -math.inf
    choice = choose(logits, Sampling.of(rows_of(hows), 100), positions)
    assert choice.broken == (1, 3)
    assert choice.tokens[[0, 2, 4]].tolist() == good.tokens[[0, 2, 4]].tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_sampled_as_the_numbers_they_are(
    dtype: torch.dtype,
) -> None:
    rng = random.Random(5)
    hows = [random_how(rng) for _ in range(16)]
    logits = random_logits(rng, 16, 200).to(dtype)
    positions = np.arange(16)
    tokens = [
        choose(x, Sampling.of(rows_of(hows), 200), positions).tokens
        for x in (logits, logits.float())
    ]
    assert tokens[0].tolist() == tokens[1].tolist()


def test_an_empty_batch_gives_no_tokens() -> None:
    choice = choose(torch.empty(0, 10), Sampling.of([], 10), np.empty(0, np.int64))
    assert (choice.tokens.tolist(), choice.broken) == ([], ())


def test_inputs_are_not_changed() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    choose(
        logits,
        Sampling.of([RowSampling.of(SamplingParams(top_k=5), 1, 0)] * 3, 50),
        np.arange(3),
    )
    assert logits.equal(before)

"""Ways to draw, and to ask for changed logits, at random."""

import random
from typing import Any

from minfer.sampling.params import MAX_ALLOWED, SamplingParams
from minfer.sampling.reference_sampler import RowSampling


def random_shape(rng: random.Random, vocab: int, **settings: Any) -> RowSampling:
    """Any combination, or nothing; there is a token left at every draw."""

    def some(max_count: int) -> list[int]:
        return rng.sample(range(vocab), rng.randint(1, min(max_count, vocab)))

    def maybe(value: Any, otherwise: Any) -> Any:
        return value if rng.random() < 0.4 else otherwise

    stops = frozenset(some(2))
    words = tuple(
        tuple(rng.randrange(vocab) for _ in range(rng.randint(1, 3)))
        for _ in range(rng.randint(1, 3))
    )
    bad_words = maybe(words, ())
    unusable = stops.union(word[-1] for word in bad_words)
    allowed = sorted({*some(MAX_ALLOWED - 1), min(set(range(vocab)) - unusable)})
    params = SamplingParams(
        repetition_penalty=maybe(rng.choice([0.7, 1.3, 2.0]), 1.0),
        frequency_penalty=maybe(rng.choice([-1.5, 0.1, 0.7]), 0.0),
        presence_penalty=maybe(rng.choice([-0.4, 0.3, 1.9]), 0.0),
        logit_bias=maybe({t: rng.choice([-100, -3.3, 0, 2.7]) for t in some(5)}, {}),
        allowed_token_ids=maybe(allowed, None),
        min_tokens=maybe(rng.randint(1, 4), 0),
        max_tokens=None,
        **settings,
    )
    seed, sample = rng.randrange(-(2**63), 2**63), rng.randrange(4)
    return RowSampling.of(params, seed, sample, stops, bad_words)


def random_row(rng: random.Random, vocab: int) -> RowSampling:
    """The same, with any temperature and filters."""
    return random_shape(
        rng,
        vocab,
        temperature=rng.choice([0, 0.3, 1.0, 2.0]),
        top_k=rng.choice([0, 0, 1, 5]),
        top_p=rng.choice([1.0, 1.0, 0.9, 0.5]),
        min_p=rng.choice([0.0, 0.0, 0.1]),
        typical_p=rng.choice([1.0, 1.0, 0.9, 0.4]),
    )

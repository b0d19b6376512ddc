"""Coins decide on a device as the pure rule says; and in an engine, whatever is asked
for.
"""

import random

import pytest

from minfer.sample import RowSampling
from minfer.speculate.accept import Target, Verdict
from minfer.speculate.rejection import Streams, drawn, rejection
from tests.effects.execution.test_judging import DRAFTS, Drafted, World, check
from tests.effects.execution.tiny_engine import VOCAB

pytestmark = pytest.mark.usefixtures("kind")


# --- the draws of a step ----------------------------------------------------------------


def thrown(rng: random.Random, target: Target) -> tuple[Drafted, Verdict]:
    """Drafts of a row, said or drawn, and which of them coins let stand."""
    count = rng.randrange(DRAFTS + 1)
    if rng.random() < 0.4:
        return said(rng, target, count)
    tokens, lines, chances = list[int](), list[list[float]](), []
    streams = Streams.of(target.how.seed, target.how.sample)
    for _ in range(count):
        # A draft model that knows of the drafts before, as its target does.
        exact = target.shaped(tokens)
        line = [x + rng.gauss(0, 0.5) for x in exact]
        one = drawn(line, bare(target.how), (*target.known, *tokens), 0, streams)
        tokens.append(one.token)
        lines.append(line)
        chances.append(one.chances)
    return Drafted((*tokens,), (*lines,)), rejection(target, tokens, chances)


def said(rng: random.Random, target: Target, count: int) -> tuple[Drafted, Verdict]:
    """Drafts that are likely."""
    tokens = list[int]()
    for _ in range(count):
        line = target.shaped(tokens)
        likely = sorted(range(VOCAB), key=line.__getitem__)[-1 - rng.randrange(2)]
        tokens.append(likely if rng.random() < 0.9 else rng.randrange(VOCAB))
    return Drafted((*tokens,)), rejection(target, tokens, [])


def bare(how: RowSampling) -> RowSampling:
    """Without what shapes logits, as these are shaped."""
    return RowSampling(
        seed=how.seed,
        sample=how.sample,
        temperature=how.temperature,
        top_k=how.top_k,
        top_p=how.top_p,
        min_p=how.min_p,
        typical_p=how.typical_p,
    )


@pytest.mark.parametrize("seed", range(6))
def test_as_the_pure_rule_says(kind: str, seed: int) -> None:
    world = World.make(random.Random(seed), kind, thrown)
    check(random.Random(seed), world, 3)

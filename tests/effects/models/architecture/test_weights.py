"""The tree of weights, and random ones."""

import pytest
import torch
from attrs import evolve

from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.architecture.weights import empty_weights, named_parts
from minfer.effects.models.checkpoint.random_weights import random_weights
from minfer.kernels.leaves import PLAIN
from tests.effects.tiny_model import CONFIG

SPEC = parse_spec(CONFIG)


def test_random_weights_need_only_a_config() -> None:
    spec = evolve(SPEC, initializer_range=0.02)
    first = dict(named_parts(spec, random_weights(spec, "float32", 1)))
    again = dict(named_parts(spec, random_weights(spec, "float32", 1)))
    other = dict(named_parts(spec, random_weights(spec, "float32", 2)))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    assert first["lm_head.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert first["model.norm.weight"].eq(1).all()


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_multiplies_with_the_embeddings(tied: bool) -> None:
    weights = empty_weights(evolve(SPEC, tie_word_embeddings=tied), "float32")
    assert (weights.lm_head.weight is weights.embed) == tied
    assert weights.lm_head.scheme is PLAIN

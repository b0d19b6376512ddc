"""The tree of weights."""

import pytest
from attrs import evolve

from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.architecture.weights import empty_weights
from minfer.kernels.leaves import PLAIN
from tests.effects.tiny_model import CONFIG

SPEC = parse_spec(CONFIG)


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_multiplies_with_the_embeddings(tied: bool) -> None:
    weights = empty_weights(evolve(SPEC, tie_word_embeddings=tied), "float32")
    assert (weights.lm_head.weight is weights.embed) == tied
    assert weights.lm_head.scheme is PLAIN

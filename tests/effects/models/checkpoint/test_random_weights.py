"""Random weights, drawn from a seed."""

import pytest
import torch
from attrs import evolve

from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.architecture.weights import named_parts
from minfer.effects.models.checkpoint.random_weights import random_weights
from tests.effects.tiny_families import VARIANTS, written
from tests.effects.tiny_model import CONFIG


def test_random_weights_need_only_a_config() -> None:
    spec = evolve(parse_spec(CONFIG), initializer_range=0.02)
    weights = dict(named_parts(spec, random_weights(spec, "float32", 1)))
    same_seed = dict(named_parts(spec, random_weights(spec, "float32", 1)))
    other_seed = dict(named_parts(spec, random_weights(spec, "float32", 2)))
    assert all(torch.equal(weights[name], same_seed[name]) for name in weights)
    assert not torch.equal(weights["lm_head.weight"], other_seed["lm_head.weight"])
    assert weights["lm_head.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert weights["model.norm.weight"].eq(1).all()


def test_targets_that_are_transposed_are_drawn_whole() -> None:
    """Of more rows than are drawn at once."""
    config = VARIANTS["GptOss", "alternate"] | {"num_local_experts": 16}
    spec = parse_spec(written("GptOss", config))
    for name, tensor in named_parts(spec, random_weights(spec, "float32", 1)):
        if name.endswith(("gate_up_proj", "down_proj")):
            assert tensor.std().item() == pytest.approx(0.3, rel=0.1)

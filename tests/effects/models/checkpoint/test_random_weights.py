"""Random weights, drawn from a seed."""

from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.architecture.weights import named_parts
from minfer.effects.models.checkpoint.random_weights import random_weights
from minfer.effects.models.ranks import SINGLE_RANK, Parallel
from tests.effects.models.rank_threads import ThreadRanks, on_ranks
from tests.effects.models.test_ranks import run
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


@pytest.mark.parametrize(
    ("family", "name", "changes"),
    [
        # Stacked and transposed, of more rows than are drawn at once
        ("GptOss", "alternate", {"num_local_experts": 16}),
        ("Llama4", "listed", {}),
        # Of neighbours that turn together
        ("DeepseekV3", "groups", {}),
        ("Cohere", "plain", {}),
        # Of a part of each head
        ("Phi", "plain", {}),
    ],
)
def test_parts_of_ranks_are_those_of_the_whole(
    family: str, name: str, changes: dict[str, Any]
) -> None:
    config = VARIANTS[family, name] | {"initializer_range": 0.1} | changes
    spec = parse_spec(written(family, config))
    whole = random_weights(spec, "float32")
    for part_name, tensor in named_parts(spec, whole):
        assert tensor.isfinite().all()
        if tensor.numel() > 2000:
            assert tensor.std().item() == pytest.approx(0.1, rel=0.1), part_name

    def on_rank(ranks: ThreadRanks) -> Tensor:
        info = ranks.rank_info
        weights = random_weights(spec, "float32", rank_info=info)
        return run(spec.for_rank(info), weights, ranks)

    results, _ = on_ranks(Parallel(tensor=2), on_rank)
    torch.testing.assert_close(
        results[0], run(spec, whole, SINGLE_RANK), rtol=1e-4, atol=4e-4
    )

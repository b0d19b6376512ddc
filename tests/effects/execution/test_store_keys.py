"""Keys that are written without attention are those that attention writes."""

from typing import Any

import pytest
import torch
from attrs import evolve

from minfer.effects.execution.open_backend import open_backend
from minfer.effects.models.architecture.batch import BatchRow, make_batch
from minfer.effects.models.architecture.layer_step import mix_tokens, store_keys
from minfer.effects.models.architecture.model_step import ModelStep
from minfer.effects.models.architecture.product_context import ProductContext
from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.checkpoint.random_weights import random_weights
from minfer.effects.models.ranks import SINGLE_RANK
from minfer.records.config import EngineConfig
from tests.effects.tiny_families import VARIANTS, written

BLOCK, BLOCKS, TOKENS = 4, 6, 13
CASES = [
    ("Qwen3", "float32"),
    ("Qwen3Next", "float32"),  # gates before the queries
    ("Olmo2", "float32"),  # a norm of all heads as one
    ("MiMoV2Flash", "float32"),  # narrow values
    ("DeepseekV3", "float32"),
    ("Qwen3", "float8_e4m3fn"),
    ("Qwen3", "int8"),
]


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize(("family", "kv_dtype"), CASES)
def test_keys_are_those_that_attention_writes(
    family: str, kv_dtype: str, kernels: bool
) -> None:
    variant = next(sizes for (name, _), sizes in VARIANTS.items() if name == family)
    spec = evolve(parse_spec(written(family, variant), "", "float32"), kv_dtype=kv_dtype)
    weights = random_weights(spec, "float32", 0)
    config = EngineConfig(
        num_blocks=BLOCKS, block_size=BLOCK, max_model_len=20, vocab_size=spec.vocab_size
    )
    backend = open_backend(spec, config, torch.device("cpu"), kernels=kernels)
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, spec.hidden_size, generator=draw)
    rows = [BatchRow(range(TOKENS - 1), 0, [4, 1, 0, 2]), BatchRow([1], 2, [5])]
    index = max(i for i, layer in enumerate(spec.layers) if layer.attention is not None)
    layer, layer_weights = spec.layers[index], weights.layers[index]
    attended, stored = (
        backend.make_cache(spec, BLOCKS, BLOCK, 20, None) for _ in range(2)
    )
    products = ProductContext(on_gpu=False, fused=False, real=None)
    with torch.inference_mode():
        for cache in (attended, stored):
            for view in cache.page_views():
                view.view(torch.uint8).zero_()
            batch: Any = make_batch(rows, BLOCK)
            step = ModelStep(batch, cache, SINGLE_RANK, products)
            if cache is attended:
                mix_tokens(layer, layer_weights, hidden.clone(), index, step)
            else:
                store_keys(layer, layer_weights, hidden.clone(), index, step)
    views = zip(attended.page_views(), stored.page_views(), strict=True)
    assert any(view.view(torch.uint8).any() for view in attended.page_views())
    for one, other in views:
        if one.itemsize > 1:
            torch.testing.assert_close(other, one, rtol=0, atol=1e-6)
        else:
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))

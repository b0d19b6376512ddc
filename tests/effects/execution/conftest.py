"""Fixtures of the tests that run the torch executor."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.architecture.weights import empty_weights, named_parts
from tests.effects.execution.tiny_engine import (
    VOCAB,
    Model,
    Tokens,
    device_kinds,
    requests,
)


@pytest.fixture(params=["cpu", "cuda"])
def device_kind(request: pytest.FixtureRequest) -> Iterator[str]:
    device_kinds.append(request.param)
    yield request.param
    device_kinds.pop()


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,  # tied random embeddings repeat their input
        initializer_range=0.4,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    reference_model: Any = Qwen2ForCausalLM(config)
    reference_model.eval()
    values = {
        **config.to_dict(),
        "architectures": ["Qwen2ForCausalLM"],
        "dtype": "float32",
    }
    spec = parse_spec(values)
    weights = empty_weights(spec, "float32")
    for name, tensor in named_parts(spec, weights):
        tensor.copy_(reference_model.state_dict()[name])
    yield Model(reference_model, spec, weights)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def reference(model: Model) -> Tokens:
    return {(r.id, 0): model.expected(r) for r in requests(0)}

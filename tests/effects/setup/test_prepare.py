"""Sizes of an engine that follow from what it is for."""

import json
from pathlib import Path

import attrs
import pytest

from minfer.effects.setup.prepare import prepare
from minfer.effects.setup.settings import EngineArgs


@pytest.mark.parametrize(("hidden", "tokens"), [(64, 8192), (8192, 512)])
def test_where_tokens_are_streamed_a_steps_work_is_bounded(
    tmp_path: Path, hidden: int, tokens: int
) -> None:
    sizes = {"hidden_size": hidden, "num_hidden_layers": 80, "vocab_size": 32_000}
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64}
    config = {"model_type": "qwen2", "dtype": "bfloat16", "intermediate_size": 4 * hidden}
    limits = {"max_position_embeddings": 8192, "rope_theta": 1e4, "rms_norm_eps": 1e-6}
    told = {"architectures": ["Qwen2ForCausalLM"], **config, **sizes, **heads, **limits}
    (tmp_path / "config.json").write_text(json.dumps(told))
    args = EngineArgs(
        model=str(tmp_path), device="cuda", streaming=True, load_format="dummy"
    )
    assert prepare(args, limit=10**13).config.max_num_batched_tokens == tokens
    by_hand = attrs.evolve(args, max_num_batched_tokens=4096)
    assert prepare(by_hand, limit=10**13).config.max_num_batched_tokens == 4096
    whole = attrs.evolve(args, streaming=False)
    assert prepare(whole, limit=10**13).config.max_num_batched_tokens == 8192

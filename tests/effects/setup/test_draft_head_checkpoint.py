"""The draft head that settings ask for: what memory holds of it, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from minfer.effects.cli.compare.measure_level import held_bytes
from minfer.effects.models.config_reader import CheckpointError
from minfer.effects.models.draft_heads.head_files import random_head
from minfer.effects.models.layout.shapes import kv_bytes_per_token
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.memory import describe
from minfer.effects.setup.prepare import prepare
from minfer.values.checks import ConfigError

TARGET: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "dtype": "float32",
}
HEAD = {
    **TARGET,
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "draft_vocab_size": 128,
}
MLA = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "max_position_embeddings": 256,
}


def written(folder: Path, config: dict[str, Any]) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture
def settings(tmp_path: Path) -> EngineArgs:
    """Random weights: no files of weights are read."""
    head = written(tmp_path / "head", HEAD)
    return EngineArgs(
        model=written(tmp_path / "target", TARGET),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        speculative_config={"method": "eagle3", "model": head},
    )


def test_a_head_counts_among_what_memory_holds(settings: EngineArgs) -> None:
    plain = prepare(evolve(settings, speculative_config=None), limit=10**9)
    setup = prepare(settings, limit=10**9)
    assert setup.head is not None
    head = setup.head.spec
    added_bytes = setup.memory.weights - plain.memory.weights
    held = held_bytes(random_head(setup.spec, head))
    assert added_bytes == setup.memory.draft_weights == held
    token_bytes = 2 * 2 * 16 * 4  # keys and values of two heads
    added_bytes = setup.memory.block_bytes - plain.memory.block_bytes
    assert added_bytes == token_bytes * setup.config.block_size
    with_layer = setup.spec.with_head_layer()
    assert kv_bytes_per_token(with_layer) == 9 * token_bytes
    assert "of that, a draft head's" in describe(setup.memory, "target")
    assert "draft head's" not in describe(plain.memory, "target")
    assert setup.fingerprint != plain.fingerprint  # its keys are beside the model's


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_window": 64}, "not supported beside attention_window"),
        ({"pipeline_parallel_size": 2}, "speculative decoding is not supported with"),
        ({"speculative_config": {"method": "mtp"}}, "MTP heads of Qwen3ForCausalLM"),
    ],
)
def test_settings_that_are_not_supported_beside_it(
    settings: EngineArgs, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, CheckpointError), match=message):
        prepare(evolve(settings, **changes), limit=10**9)


@pytest.mark.parametrize(
    ("target", "head", "changes", "message"),
    [
        ({}, {"vocab_size": 500}, {}, "a vocabulary of 500"),
        ({}, {"hidden_size": 32}, {}, "hidden states of 32"),
        ({}, {"num_hidden_layers": 2}, {}, "a head(?s:.)*layers|layers(?s:.)*head"),
        (
            {},
            {"num_key_value_heads": 4},
            {"kv_cache_dtype": "int8_per_token_head"},
            "other numbers of a token",
        ),
        (MLA, {}, {}, "latents|MLA|DeepseekV3"),
    ],
)
def test_heads_that_do_not_fit(
    settings: EngineArgs,
    tmp_path: Path,
    target: dict[str, Any],
    head: dict[str, Any],
    changes: dict[str, Any],
    message: str,
) -> None:
    model = written(tmp_path / "other target", target or TARGET)
    config = {"method": "eagle3", "model": written(tmp_path / "other", {**HEAD, **head})}
    args = evolve(settings, model=model, speculative_config=config, **changes)
    with pytest.raises((ConfigError, CheckpointError), match=message):
        prepare(args, limit=10**9)


def test_a_head_that_is_not_there(settings: EngineArgs) -> None:
    config = {"method": "eagle3", "model": "/no/such/folder"}
    with pytest.raises(ConfigError, match="as a draft head: "):
        prepare(evolve(settings, speculative_config=config), limit=10**9)

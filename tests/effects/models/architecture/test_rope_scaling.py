"""Rotary embedding and its scalings, against transformers."""

from typing import Any, Final

import pytest
import torch
import transformers

from minfer.effects.execution.cpu.paged_attention import KVCache, make_cache, rope_table
from minfer.effects.models.architecture.rope_scaling import Rope, inverse_frequencies
from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.config_reader import ModelConfigError
from minfer.effects.models.fallback import fallback_spec
from tests.effects.tiny_families import ROPES, SIZES, config_of
from tests.effects.tiny_model import gqa_of, with_attention

# As Llama 4 Scout has it: no frequencies are blended.
STEP: Final = ROPES["llama3"] | {"high_freq_factor": 1.0}


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("name", [*ROPES, "step"])
def test_the_rotary_table_is_transformers_own(name: str, head_dim: int) -> None:
    sizes = SIZES | {"head_dim": head_dim, "max_position_embeddings": 32768}
    ropes = {**ROPES, "step": STEP}
    scaling = ropes[name] | {"original_max_position_embeddings": 8192}
    if name in ("default", "linear"):
        scaling.pop("original_max_position_embeddings")
    config = transformers.LlamaConfig(**sizes, rope_parameters=dict(scaling))
    module = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    spec = parse_spec(
        sizes | {"architectures": ["LlamaForCausalLM"], "rope_parameters": scaling}
    )
    rope = gqa_of(spec).rope
    assert rope is not None
    assert torch.equal(inverse_frequencies(rope, head_dim), module.inv_freq)
    positions = torch.tensor([0, 1, 7, 100, 8191, 8192, 20000, 32767])
    cos, sin = module(torch.zeros(1), positions[None])
    table = rope_table(rope, head_dim, 32768)[positions, :, 0]
    torch.testing.assert_close(table[:, 0], cos[0], rtol=0, atol=2e-7)
    signs = torch.tensor([-1.0, 1.0]).repeat_interleave(
        head_dim // 2
    )  # as `rotate` wants them
    torch.testing.assert_close(table[:, 1] * signs, sin[0], rtol=0, atol=2e-7)


def rope_of(config: dict[str, Any]) -> Rope | None:
    return gqa_of(parse_spec(config)).rope


@pytest.mark.parametrize("original", [None, 4, 40])
@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_rope_at_the_edges_of_its_range(original: int | None, factor: float) -> None:
    """Bands that are empty or lie outside the head; an original context left out."""
    for extra in (
        {},
        {"truncate": None},
        {"beta_fast": 1.0},
        {"mscale": 2, "mscale_all_dim": 0},
    ):
        scaling = {"rope_type": "yarn", "rope_theta": 1e4, "factor": factor, **extra}
        if original:
            scaling["original_max_position_embeddings"] = original
        config = transformers.LlamaConfig(**SIZES, rope_parameters=dict(scaling))
        module = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
        rope = gqa_of(parse_spec(config_of(rope_parameters=scaling))).rope
        assert rope is not None
        assert torch.equal(inverse_frequencies(rope, 16), module.inv_freq)
        assert rope.attention_factor == module.attention_scaling


@pytest.mark.parametrize("key", ["fcator", "beta", "long_factor"])
@pytest.mark.parametrize("name", ROPES)
def test_keys_that_a_scaling_does_not_have_are_named(name: str, key: str) -> None:
    for field in ("rope_parameters", "rope_scaling"):
        scaling = ROPES[name] | {key: 2.0}
        changes: dict[str, Any] = {"rope_parameters": ..., field: scaling}
        config = config_of(**changes)
        with pytest.raises(ModelConfigError, match=f"{field}: {key} is not a key of"):
            parse_spec(config)
        config[field] = scaling | {key: None}
        assert parse_spec(config) == parse_spec(config_of(rope_parameters=ROPES[name]))


def test_keys_that_no_scaling_has_are_named_of_other_families() -> None:
    olmo = {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]}
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(ModelConfigError, match="rope_parameters: fcator is not a key"):
        fallback_spec({**olmo, "rope_parameters": {**linear, "fcator": 3.0}})
    kinds = {"full_attention": linear, "sliding_attention": {**linear, "beta": 3.0}}
    gemma = {"model_type": "gemma3_text", "rope_parameters": kinds}
    with pytest.raises(ModelConfigError, match="sliding_attention: beta is not a key"):
        fallback_spec(gemma)


@pytest.mark.long
def test_keys_that_a_models_own_code_reads_are_known() -> None:
    """HunYuan's, which has its own dynamic scaling."""
    sizes = SIZES | {"num_hidden_layers": 1}
    scaling = {"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0, "rope_theta": 1e4}
    config = {**sizes, "model_type": "hunyuan_v1_dense", "rope_parameters": scaling}
    assert fallback_spec(config).parameters
    with pytest.raises(ModelConfigError, match="alhpa is not a key"):
        fallback_spec({**config, "rope_parameters": {**scaling, "alhpa": 1.0}})


@pytest.mark.parametrize("name", ROPES)
def test_old_and_new_forms_of_rope_are_the_same(name: str) -> None:
    new = {"rope_theta": 5e5, **ROPES[name]}
    old: dict[str, Any] = dict(new)
    theta = old.pop("rope_theta")
    expected = parse_spec(config_of(rope_parameters=new))
    rope = gqa_of(expected).rope
    assert rope is not None
    assert rope.theta == theta
    for kind in ("rope_type", "type"):
        scaling = {
            kind: old["rope_type"],
            **{k: v for k, v in old.items() if k != "rope_type"},
        }
        spec = parse_spec(
            config_of(rope_parameters=..., rope_scaling=scaling, rope_theta=theta)
        )
        assert spec == expected
    nested = parse_spec(config_of(rope_parameters=old, rope_theta=theta))
    assert nested == expected


def test_rope_scaling_has_precedence_as_in_transformers() -> None:
    changes: dict[str, Any] = {"rope_parameters": ROPES["yarn"]}
    changes |= {"rope_scaling": {"type": "linear", "factor": 2.0}}
    assert rope_of(config_of(**changes)) == Rope("linear", 10000.0, 2.0)
    assert rope_of(config_of(rope_parameters=None, rope_scaling={})) == Rope()
    outer = config_of(rope_parameters=ROPES["yarn"], original_max_position_embeddings=32)
    rope = rope_of(outer)
    assert rope is not None
    assert rope.original == 32


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        (ROPES["default"], 256),
        ({"rope_type": "linear", "factor": 2.5}, 640),
        (ROPES["llama3"], 256),
        (ROPES["yarn"] | {"original_max_position_embeddings": 256}, 1024),
        (ROPES["yarn"], 256),
        ({"rope_type": "yarn", "factor": 2.0}, 512),
        (
            {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64},
            256,
        ),
    ],
)
def test_the_context_that_follows_from_scaling(
    rope: dict[str, Any], context: int
) -> None:
    assert parse_spec(config_of(rope_parameters=rope)).max_position_embeddings == context


def test_a_cache_in_which_blocks_are_given_back_has_the_angles_of_all_positions() -> None:
    spec = parse_spec(config_of("Mistral", sliding_window=8))

    def angles(cache: KVCache) -> list[int]:
        return [len(table) for table in cache.ropes.values()]

    assert angles(make_cache(spec, 3, 16)) == [256]
    assert angles(make_cache(spec, 3, 16, max_model_len=100)) == [100]
    full = parse_spec(config_of("Mistral"))
    assert angles(make_cache(full, 3, 16, max_model_len=100)) == [48]
    assert angles(make_cache(with_attention(full, rope=None), 3, 16)) == []

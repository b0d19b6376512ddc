"""From configs to specs: what they leave out, what is refused, what changes nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.config_reader import ModelConfigError, UnsupportedModelError
from minfer.effects.models.families.table import FAMILIES
from tests.effects.tiny_families import ROPES, VARIANTS, config_of, written
from tests.effects.tiny_model import expected_tensors, gqa_of, read_spec


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("Qwen2", {"use_sliding_window": True}),
        ("Qwen2", {"use_sliding_window": True, "num_hidden_layers": 40}),
        ("Qwen2", {"sliding_window": 64}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": None}),
        (
            "Qwen3",
            {"use_sliding_window": True, "sliding_window": 99, "max_window_layers": 1},
        ),
        ("Qwen3", {}),
        ("Mistral", {}),
        ("Mistral", {"sliding_window": None}),
        ("Mistral", {"sliding_window": 17, "head_dim": 8}),
        ("Llama", {"head_dim": None, "attention_bias": True}),
    ],
)
def test_what_a_config_leaves_out_is_transformers_default(
    family: str, config: dict[str, Any]
) -> None:
    sizes = {
        "vocab_size": 16,
        "hidden_size": 512,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        **config,
    }
    hf_config = getattr(transformers, f"{family}Config")(**sizes)
    spec = parse_spec(sizes | {"architectures": [f"{family}ForCausalLM"]})
    with torch.device("meta"):
        hf_model = getattr(transformers, f"{family}ForCausalLM")(hf_config)
    attention = [layer.self_attn for layer in hf_model.model.layers]
    windows = tuple(
        getattr(a, "sliding_window", hf_config.to_dict().get("sliding_window"))
        for a in attention
    )
    assert spec.windows == windows
    assert (gqa_of(spec).head_dim, gqa_of(spec).kv_heads) == (
        attention[0].head_dim,
        hf_config.num_key_value_heads,
    )
    assert spec.max_position_embeddings == hf_config.max_position_embeddings
    assert spec.norms.eps == hf_config.rms_norm_eps
    assert spec.eos_ids == (
        () if hf_config.eos_token_id is None else (hf_config.eos_token_id,)
    )
    assert spec.tie_word_embeddings == hf_config.tie_word_embeddings
    assert expected_tensors(spec) == {
        name: tuple(tensor.shape) for name, tensor in hf_model.named_parameters()
    }


YARN, LLAMA3 = ROPES["yarn"], ROPES["llama3"]
LONGROPE = VARIANTS["Phi3", "longrope"]["rope_parameters"]


@pytest.mark.parametrize(
    ("family", "changes", "error", "names"),
    [
        (
            "Llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            UnsupportedModelError,
            ["'dynamic'", "yarn"],
        ),
        (
            "Llama",
            {"rope_scaling": {"type": "longrope", "long_factor": [1.0]}},
            UnsupportedModelError,
            ["rope_scaling", "'longrope'"],
        ),
        ("Llama", {"rope_scaling": {"rope_type": None}}, UnsupportedModelError, ["None"]),
        (
            "Llama",
            {"rope_scaling": {"rope_type": ["yarn"]}},
            UnsupportedModelError,
            ["yarn"],
        ),
        ("Llama", {"rope_scaling": "yarn"}, ModelConfigError, ["rope_scaling", "'yarn'"]),
        (
            "Qwen3",
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            ModelConfigError,
            ["rope_parameters", "each kind of layer"],
        ),
        (
            "Llama",
            {"partial_rotary_factor": 0.5},
            ModelConfigError,
            ["partial_rotary_factor"],
        ),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
            ModelConfigError,
            ["rope_parameters", "partial_rotary_factor"],
        ),
        *(
            ("Gemma3", {key: value}, ModelConfigError, [f"{key}{name}"])
            for key, value, name in (
                ("rope_scaling", "linear", " must be an object"),
                ("rope_scaling", [1], " must be an object"),
                ("rope_parameters", [1], " must be an object"),
                ("rope_parameters", ROPES["linear"], ": rope_type is not known"),
                ("rope_parameters", {"chunked": {"factor": 2.0}}, ": chunked is not"),
                ("rope_parameters", {"full_attention": [1]}, ": full_attention must be"),
            )
        ),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "linear"}},
            ModelConfigError,
            ["factor", "nothing"],
        ),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 0.5}},
            ModelConfigError,
            ["factor", "0.5"],
        ),
        (
            "Llama",
            {"rope_parameters": YARN | {"factor": "4"}},
            ModelConfigError,
            ["factor", "'4'"],
        ),
        (
            "Llama",
            {"rope_parameters": YARN | {"factor": 1e300}},
            ModelConfigError,
            ["factor"],
        ),
        (
            "Llama",
            {"rope_parameters": YARN | {"beta_fast": 0.5}},
            ModelConfigError,
            ["beta_fast", "0.5"],
        ),
        (
            "Llama",
            {"rope_parameters": YARN | {"rope_theta": 1.0}},
            UnsupportedModelError,
            ["yarn"],
        ),
        (
            "Llama",
            {"rope_parameters": YARN | {"original_max_position_embeddings": 0}},
            ModelConfigError,
            ["original_max_position_embeddings", "0"],
        ),
        (
            "Llama",
            {"rope_parameters": LLAMA3 | {"high_freq_factor": 0.5}},
            ModelConfigError,
            ["high_freq_factor", "low_freq_factor"],
        ),
        (
            "Llama",
            {"rope_parameters": LLAMA3 | {"low_freq_factor": None}},
            ModelConfigError,
            ["low_freq_factor", "None"],
        ),
        (
            "Llama",
            {"rope_theta": -1.0, "rope_parameters": ...},
            ModelConfigError,
            ["rope_theta", "-1.0"],
        ),
        (
            "Llama",
            {"sliding_window": 64},
            UnsupportedModelError,
            ["sliding_window", "Llama"],
        ),
        (
            "Llama",
            {"layer_types": ["sliding_attention"] * 3},
            ModelConfigError,
            ["layer_types"],
        ),
        (
            "Llama",
            {"attention_bias": "yes"},
            ModelConfigError,
            ["attention_bias", "'yes'"],
        ),
        ("Llama", {"mlp_bias": 1}, ModelConfigError, ["mlp_bias", "1"]),
        ("Mistral", {"sliding_window": 0}, ModelConfigError, ["sliding_window", "0"]),
        (
            "Mistral",
            {"sliding_window": "all"},
            ModelConfigError,
            ["sliding_window", "'all'"],
        ),
        (
            "Mixtral",
            {"sliding_window": 8, "layer_types": ["full_attention"] * 3},
            UnsupportedModelError,
            ["layer_types", "MixtralForCausalLM"],
        ),
        (
            "Qwen3",
            {"layer_types": ["conv"] * 3},
            UnsupportedModelError,
            ["layer_types", "conv"],
        ),
        (
            "Qwen2",
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": -1,
                "layer_types": None,
            },
            ModelConfigError,
            ["max_window_layers", "-1"],
        ),
        ("Qwen3", {"hidden_act": "gelu"}, UnsupportedModelError, ["hidden_act", "gelu"]),
        (
            "Mistral",
            {"quantization_config": {"bits": 4}},
            UnsupportedModelError,
            ["quantization"],
        ),
        ("Qwen3", {"head_dim": 15}, ModelConfigError, ["head_dim", "15"]),
        *(
            ("Granite", {key: value}, ModelConfigError, [key, str(value)])
            for key, value in (
                ("residual_multiplier", 0),
                ("embedding_multiplier", "12"),
                ("attention_multiplier", -0.5),
                ("logits_scaling", 0.0),
            )
        ),
        ("Llama", {"logits_scaling": 8}, UnsupportedModelError, ["logits_scaling", "8"]),
        *(
            ("SmolLM3", changes, ModelConfigError, names)
            for changes, names in (
                ({"no_rope_layers": [1, 0]}, ["no_rope_layers", "at least", "= 3"]),
                ({"no_rope_layers": [1, 0, 2]}, ["no_rope_layers", "0 and 1"]),
                ({"no_rope_layers": "all"}, ["no_rope_layers", "'all'"]),
                (
                    {"no_rope_layers": None, "no_rope_layer_interval": 0},
                    ["no_rope_layer_interval", "0"],
                ),
            )
        ),
        (
            "Olmo3",
            {"rope_parameters": ROPES["linear"]},
            ModelConfigError,
            ["rope_parameters: rope_type is not known"],
        ),
        ("Glm4", {"hidden_act": "gelu"}, UnsupportedModelError, ["hidden_act", "gelu"]),
        *(
            ("Phi3", {"rope_parameters": LONGROPE | changes}, error, names)
            for changes, error, names in (
                (
                    {"rope_type": "linear"},
                    UnsupportedModelError,
                    ["'linear'", "longrope"],
                ),
                ({"short_factor": [1.0]}, ModelConfigError, ["short_factor", "8"]),
                ({"long_factor": [1.0] * 9}, ModelConfigError, ["long_factor", "8"]),
                ({"long_factor": None}, ModelConfigError, ["long_factor", "None"]),
                ({"long_factor": [0.0] * 8}, ModelConfigError, ["long_factor", "0.0"]),
                ({"short_factor": [1e99] * 8}, ModelConfigError, ["short_factor"]),
                ({"factor": -1.0}, ModelConfigError, ["factor", "-1.0"]),
                ({"beta_fast": 1.0}, ModelConfigError, ["beta_fast is not a key"]),
                (
                    {"partial_rotary_factor": 0.2},
                    ModelConfigError,
                    ["rope_scaling", "factor"],
                ),
            )
        ),
    ],
)
def test_what_is_refused_is_named(
    family: str, changes: dict[str, Any], error: type[Exception], names: list[str]
) -> None:
    with pytest.raises(error) as caught:
        parse_spec(config_of(family, **changes), "model/config.json")
    for name in [*names, "model/config.json"]:
        assert name in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"partial_rotary_factor": 1.0},
        {"sliding_window": 64, "use_sliding_window": False},
        {"layer_types": ["full_attention"] * 3},
    ],
)
def test_what_changes_nothing_is_accepted(changes: dict[str, Any]) -> None:
    assert parse_spec(config_of(**changes)) == parse_spec(config_of())


def test_a_saved_config_is_read_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("Qwen3")))
    assert read_spec(tmp_path).family is FAMILIES["Qwen3ForCausalLM"]


@pytest.mark.parametrize(
    ("family", "name", "rotations"),
    [
        ("Youtu", "halves", (True, False)),
        ("Mistral4", "groups", (True, False)),
        ("DeepseekV3", "groups", (True, False)),
        ("DeepseekV2", "groups", (True, True)),  # whose class has no such field
    ],
)
def test_null_is_false_where_an_absent_flag_is_true(
    family: str, name: str, rotations: tuple[bool, bool]
) -> None:
    config = written(family, VARIANTS[family, name])
    config.pop("rope_interleave", None)
    changes_by_case: tuple[dict[str, Any], ...] = ({}, {"rope_interleave": None})
    for changes, interleaved in zip(changes_by_case, rotations, strict=True):
        rope = parse_spec({**config, **changes}).attentions[0].rope
        assert rope is not None
        assert rope.interleaved == interleaved


@pytest.mark.parametrize(
    ("name", "length"), [("scaled queries", 128), ("tied, window", 8)]
)
def test_queries_grow_from_the_original_context_that_ropes_have(
    name: str, length: int
) -> None:
    """Ropes of type yarn have the outer one, others none."""
    config = written("Ministral3", VARIANTS["Ministral3", name])
    spec = parse_spec({**config, "original_max_position_embeddings": 128})
    scale = gqa_of(spec).query_scale
    assert scale is not None
    assert scale.length == length


@pytest.mark.parametrize(
    ("family", "name"),
    [("Olmo3", "yarn"), ("Laguna", "ropes, tied"), ("MiMoV2Flash", "listed")],
)
def test_an_outer_original_context_is_not_of_ropes_by_kind(
    family: str, name: str
) -> None:
    config = written(family, VARIANTS[family, name])
    spec = parse_spec({**config, "original_max_position_embeddings": 16})
    assert spec == parse_spec(config)


def test_an_empty_list_of_ends_is_not_the_default() -> None:
    config = written("Glm4", VARIANTS["Glm4", "plain"])
    assert len(parse_spec({**config, "eos_token_id": None}).eos_ids) == 3
    assert parse_spec({**config, "eos_token_id": []}).eos_ids == ()


def test_cohere2_reads_the_size_of_heads_as_transformers_does() -> None:
    config = written("Cohere2", VARIANTS["Cohere2", "pattern"] | {"head_dim": 32})
    assert gqa_of(parse_spec(config)).head_dim == config["head_dim"] == 32
    assert gqa_of(parse_spec({**config, "head_dim": None})).head_dim == 16


def test_mistral_with_layer_types_is_ministral() -> None:
    """As Ministral 8B is published, and as transformers' AutoModel takes it."""
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    config = config_of("Ministral", layer_types=kinds, sliding_window=16)
    published = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    spec = parse_spec({**config, **published})
    assert spec.windows == (None, 16, 16)
    assert spec.layers == parse_spec(config).layers


def test_a_pattern_of_letters_is_the_list_of_kinds() -> None:
    """As Nemotron-H's configs were published; the number of layers follows from it."""
    config = written("NemotronH", VARIANTS["NemotronH", "latent experts"])
    assert config["layers_block_type"] == [
        "moe",
        "linear_attention",
        "mlp",
        "full_attention",
    ]
    published = config | {
        "layers_block_type": None,
        "hybrid_override_pattern": "EM-*",
        "num_hidden_layers": 52,
    }
    spec = parse_spec(published)
    assert spec == parse_spec(config)
    kinds = [
        [type(sublayer).__name__ for sublayer in layer.sublayers] for layer in spec.layers
    ]
    assert kinds == [["MoE"], ["Mamba2"], ["Dense"], ["GQA"]]

"""The fields of configs: read, refused by name, or inert, as transformers has them."""

from typing import Any

import pytest
import torch
import transformers

from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.config_reader import CheckpointError, UnsupportedModelError
from minfer.effects.models.families.table import BY_MODEL_TYPE
from minfer.effects.models.families.text_halves import TEXT_HALVES
from minfer.effects.models.fields import INERT, INERT_OF, NEUTRAL, NEUTRAL_OF
from minfer.effects.models.layout.shapes import parameter_count
from tests.effects.published_configs import BILLIONS, PUBLISHED
from tests.effects.tiny_families import VARIANTS, WINDOW, class_of, written

# A config of each family in which every field that it reads is in use.
RICH = {
    "Qwen2": "windows above",
    "Qwen3": "biases, windows",
    "Llama": "biases, tied",
    "Llama4": "chunks",
    "MiMoV2Flash": "groups",
    "Mistral": "window",
    "Ministral": "windows alternate",
    "Mixtral": "experts, windows",
    "Ministral3": "tied, window",
    "Mistral4": "groups",
    "Qwen2Moe": "windows",
    "Qwen3Moe": "windows",
    "GraniteMoeHybrid": "multipliers",
    "FalconH1": "multipliers",
    "NemotronH": "latent experts",
    "Lfm2": "adjusted",
    "Lfm2Moe": "no biases",
    "KimiLinear": "groups",
    "Jamba": "biases",
    "Qwen3Next": "listed",
    "Qwen3_5": "listed",
    "Qwen3_5Moe": "listed",
    "Glm4Moe": "groups",
    "DeepseekV2": "groups",
    "DeepseekV3": "groups",
    "Glm4MoeLite": "listed",
    "Youtu": "halves",
    "Dots1": "groups, windows",
    "SolarOpen": "groups, biases",
    "Laguna": "gates of elements",
    "MiniMaxM2": "tied, a quarter turns",
    "HunYuanDenseV1": "alpha",
    "HunYuanMoEV1": "biases, alpha",
    "Ernie4_5": "biases",
    "Ernie4_5_Moe": "biases, tied",
    "GptOss": "alternate",
    "Gemma2": "caps",
    "Gemma3": "ropes",
    "Gemma3n": "all",
    "Gemma4": "all",
    "Granite": "multipliers",
    "SmolLM3": "windows",
    "GraniteMoe": "multipliers",
    "GraniteMoeShared": "multipliers",
    "Olmo2": "biases",
    "Glm": "plain",
    "Glm4": "plain",
    "SeedOss": "plain",
    "Phi3": "longrope",
    "Olmo3": "ropes",
    "Olmoe": "biases, normalised",
    "Cohere": "biases, untied",
    "Cohere2": "pattern of two",
    "StableLm": "all",
    "Falcon": "one norm",
    "Starcoder2": "window",
    "Phi": "plain",
}
OTHER: dict[str, Any] = {  # values for fields that are absent
    "sliding_window": WINDOW,
    "q_lora_rank": 20,
    "no_rope_layers": [0, 1, 1],
    "mlp_only_layers": [1],
    "moe_layers": [1],
    "full_attn_idxs": [1],
    "mlp_layer_types": ["dense", "dense", "sparse"],
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "first_k_dense_replace": 2,
    "moe_layer_end_index": 1,
    "gating": "per-head",
    "num_attention_heads_per_layer": [4, 8, 2],
    "position_embedding_type": "nope",
    "layers_block_type": ["linear_attention", "moe", "moe", "full_attention"],
    "mtp_layers_block_type": ["moe"],
    "mamba_ssm_cache_dtype": "bfloat16",
    "mamba_hidden_act": "gelu",
    "mlp_hidden_act": "silu",
    "mlp_multipliers": [0.8, 0.9],
    "ssm_multipliers": [0.7, 0.7, 0.7, 0.7, 0.7],
    "time_step_limit": [0.1, 0.8],
    "topk_group": 3,
    "n_group": 2,
    "topk_method": "unknown",
    "hidden_act": "gelu",
    "hidden_activation": "gelu",
    "activation": "silu",
    "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 123.0},
    "per_layer_config": {"1": {"head_dim": 64}},
    "tie_word_embeddings": None,
}
DENSE = {"mlp_only_layers": [0]}  # so that the width of dense layers matters
DEFAULT = {"rope_type": "default", "rope_theta": 321.0}
MORE: dict[str, dict[str, Any]] = {
    "Llama4": {"interleave_moe_layer_step": 2, "attention_bias": True},
    "Qwen2Moe": DENSE,
    "Qwen3Moe": DENSE | {"num_local_experts": 6},
    "GptOss": {"rope_parameters": DEFAULT},
    "SmolLM3": {"no_rope_layer_interval": 3},
    "Phi3": {"sliding_window": WINDOW},
}


# Further ones, for fields that exclude others.
BESIDE: dict[str, list[dict[str, Any]]] = {
    "Falcon": [written("Falcon", VARIANTS["Falcon", "one key head"])],
    "FalconH1": [written("FalconH1", VARIANTS["FalconH1", "norm first"])],
    "KimiLinear": [written("KimiLinear", VARIANTS["KimiLinear", "plain"])],
    "Lfm2": [
        written("Lfm2", VARIANTS["Lfm2", "attention listed"]) | {"layer_types": None}
    ],
}


def rich(family: str) -> dict[str, Any]:
    config = VARIANTS[family, RICH[family]] | MORE.get(family, {})
    config |= {"use_sliding_window": True, "max_window_layers": 2}
    return {k: v for k, v in config.items() if (family, k) != ("Qwen3Moe", "num_experts")}


def raw(family: str) -> dict[str, Any]:
    return rich(family) | {"architectures": [f"{family}ForCausalLM"]}


def fields_of(family: str) -> set[str]:
    fields: dict[str, Any] = class_of(family)().to_dict()
    return {
        name for name in fields if name not in transformers.PretrainedConfig().to_dict()
    }


def inert_of(family: str) -> frozenset[str]:
    kind = class_of(family).model_type
    return INERT | INERT_OF.get(kind, frozenset())


def other(name: str, value: Any) -> Any:
    """Another value of the field."""
    if name == "rope_parameters" and "full_attention" in value:
        return {"full_attention": DEFAULT, "sliding_attention": DEFAULT}
    if name in OTHER and OTHER[name] != value:
        return not value if OTHER[name] is None else OTHER[name]
    if isinstance(value, bool):
        return not value
    if isinstance(value, list):
        return value[::-1]
    if value is None or isinstance(value, int):
        return 2 * (value or 4)
    return value * 1.5


def reading(config: dict[str, Any], name: str) -> Any:
    """What a config says, or whether its refusal names the field."""
    try:
        return parse_spec(config)
    except CheckpointError as error:
        return name if name in str(error) else parse_spec(config)


@pytest.mark.parametrize("family", RICH)
def test_every_field_of_a_class_is_read_refused_or_inert(family: str) -> None:
    """A field that is not inert changes the spec, or the refusal names it."""
    unread = fields_of(family) - inert_of(family)
    for config in (raw(family), *BESIDE.get(family, ())):
        unread = {name for name in unread if not changes(family, config, name)}
    assert unread == set()


def changes(family: str, config: dict[str, Any], name: str) -> bool:
    """Whether another value of a field changes the spec, or is refused by its name."""
    value = config.get(name, class_of(family)().to_dict()[name])
    changed = {**config, name: other(name, value)}
    return bool(reading(changed, name) != parse_spec(config))


@pytest.mark.long
@pytest.mark.parametrize("family", RICH)
def test_inert_fields_change_nothing_in_transformers_either(family: str) -> None:
    inert = sorted(inert_of(family) & fields_of(family) - {"eos_token_id"})
    config = rich(family) | {"initializer_range": 0.3}
    kind = getattr(transformers, f"{family}ForCausalLM")
    ids = torch.arange(40)[None] * 3
    changed: dict[str, Any] = {}
    for name in inert:
        value = getattr(class_of(family)(**config), name)
        changed[name] = 0.5 if name.endswith("dropout") else other(name, value)
        if name in ("num_key_value_heads", "head_dim", "qk_head_dim"):
            changed[name] = value  # MLA's own
    with torch.random.fork_rng(), torch.inference_mode():
        torch.manual_seed(0)
        hf_model = kind(class_of(family)(**config)).eval()
        expected = hf_model(ids).logits
        changed_model = kind(class_of(family)(**{**config, **changed})).eval()
        changed_model.load_state_dict(hf_model.state_dict())
        assert torch.equal(changed_model(ids).logits, expected)
    assert parse_spec(raw(family) | {"initializer_range": 0.3}) == parse_spec(
        {**raw(family), **changed, "initializer_range": 0.3}
    )


ASKING = {"index_topk": 8, "attention_chunk_size": 8, "clip_qkv": 8.0}
REFUSED = [("Llama", key, neutral) for key, neutral in NEUTRAL.items()] + [
    (family, key, neutral)
    for family in ("DeepseekV2", "DeepseekV3", "Glm4Moe")
    for key, neutral in NEUTRAL_OF[class_of(family).model_type].items()
]


@pytest.mark.parametrize(("family", "key", "neutral"), REFUSED)
def test_what_would_change_the_logits_is_refused_by_name(
    family: str, key: str, neutral: tuple[Any, ...]
) -> None:
    config = raw(family)
    spec = parse_spec({name: v for name, v in config.items() if name != key})
    for value in (None, *neutral):
        if (key, value) != ("topk_method", "greedy"):  # which is without groups
            accepted = {**config, key: value} if value is not None else config
            assert parse_spec(accepted) == spec or family == "DeepseekV2"
    asking = "best" if key == "topk_method" else ASKING.get(key, 0.37)
    with pytest.raises(UnsupportedModelError, match=key):
        parse_spec({**config, key: asking})


def test_fields_that_transformers_does_not_have_are_ignored() -> None:
    config = raw("Qwen3")
    assert parse_spec({**config, "a_new_field": 3, "mlp_bias": True}) == parse_spec(
        config
    )


# Fields that a class takes, though its own list of fields does not have them.
TAKEN = {
    ("Ernie4_5_Moe", "head_dim"),
    ("Gemma3", "sliding_window_pattern"),
    ("GptOss", "original_max_position_embeddings"),
    ("GraniteMoeHybrid", "head_dim"),
    ("FalconH1", "head_dim"),
    ("Jamba", "head_dim"),
    ("Lfm2", "head_dim"),
    ("Lfm2Moe", "head_dim"),
    ("Mistral", "layer_types"),  # then it is Ministral
}
FURTHER_LAYERS = {  # whose tensors are skipped
    "num_mtp_layers",
    "num_mtp_modules",
    "num_nextn_predict_layers",
}


@pytest.mark.parametrize("family", RICH)
def test_fields_of_other_classes_are_ignored_or_refused_by_name(family: str) -> None:
    """A row reads no field that its class in transformers does not have."""
    config = written(family, VARIANTS[family, RICH[family]])
    spec = parse_spec(config)
    own = {*config, *class_of(family).attribute_map, *FURTHER_LAYERS}
    foreign = {
        name: value
        for other_family in RICH
        for name, value in written(
            other_family, VARIANTS[other_family, RICH[other_family]]
        ).items()
        if name not in own and (family, name) not in TAKEN and value is not None
    }
    for name, value in foreign.items():
        for given in (value, other(name, value)):
            assert reading({**config, name: given}, name) in (spec, name), name


def test_families_of_the_lists_exist() -> None:
    kinds = BY_MODEL_TYPE.keys() | TEXT_HALVES.keys()
    assert kinds >= NEUTRAL_OF.keys() | INERT_OF.keys()
    assert BY_MODEL_TYPE.keys() == {class_of(family).model_type for family in RICH}
    assert not INERT & NEUTRAL.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(name: str) -> None:
    """Parameters in billions, to the digits that their authors give."""
    spec = parse_spec(PUBLISHED[name], dtype="bfloat16")
    billions = parameter_count(spec) / 1e9
    assert billions == pytest.approx(BILLIONS[name], rel=2e-3)
    unknown = {**PUBLISHED[name], "quantization_config": {"quant_method": "quip"}}
    with pytest.raises(UnsupportedModelError, match=r"'quip'.*--quantization"):
        parse_spec(unknown)


def test_what_transformers_writes_is_read_as_what_it_was_made_of() -> None:
    for family in RICH:
        config = rich(family) | {"max_window_layers": 1}
        written_config = written(family, config)
        written_config.pop(
            "num_nextn_predict_layers", None
        )  # are in no checkpoint of these
        assert parse_spec(written_config) == parse_spec(
            {"architectures": [f"{family}ForCausalLM"], **config}
        )

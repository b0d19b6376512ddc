"""What is refused at load, in the words that people use, with what would work."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from minfer.effects.models.architecture.refusals import KINDS
from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.checkpoint.checkpoint import load_weights
from minfer.effects.models.config_reader import (
    CheckpointError,
    ModelConfigError,
    UnsupportedModelError,
)
from minfer.effects.models.families.table import BY_MODEL_TYPE, FAMILIES
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.prepare import prepare
from tests.effects.published_configs import PUBLISHED
from tests.effects.tiny_families import VARIANTS, save
from tests.effects.tiny_model import read_spec, with_feed_forward

DENSE_ONLY = "every layer is attention"
# The config's model_type, architecture, and words of the refusal.
MODELS = [
    ("mamba", "MambaForCausalLM", ["state space", DENSE_ONLY]),
    ("mamba2", "Mamba2ForCausalLM", ["state space"]),
    ("falcon_mamba", "FalconMambaForCausalLM", ["state space", "Jamba"]),
    ("zamba2", "Zamba2ForCausalLM", ["state space", "Nemotron-H"]),
    ("rwkv", "RwkvForCausalLM", ["recurrent"]),
    ("minimax", "MiniMaxForCausalLM", ["linear attention", "Qwen3-Next"]),
    ("bert", "BertForMaskedLM", ["an encoder", "causal language models"]),
    ("roberta", "RobertaModel", ["an encoder"]),
    ("modernbert", "ModernBertForMaskedLM", ["an encoder"]),
    ("t5", "T5ForConditionalGeneration", ["encoder with a decoder"]),
    ("whisper", "WhisperForConditionalGeneration", ["encoder with a decoder"]),
    ("deepseek_v32", "DeepseekV32ForCausalLM", ["MLA with sparse attention", "Kimi K2"]),
    ("minicpm3", "MiniCPM3ForCausalLM", ["MLA", "DeepSeek-V2"]),
    ("longcat_flash", "LongcatFlashForCausalLM", ["MLA"]),
]
HOW = "quantization_config"
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
# Of published checkpoints, and the scheme of their matrices.
QUANTIZED = [
    ("gpt-oss-20b", {"quant_method": "mxfp4"}, "mxfp4"),
    ("DeepSeek-V3", BLOCKS, "fp8_per_block"),
    ("Kimi-K2", BLOCKS, "fp8_per_block"),
    ("Qwen3-30B-A3B", {"quant_method": "gptq", "bits": 4}, "int4-g128"),
]
ALTERNATING = ("full_attention", "sliding_attention", "full_attention")
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
LAGUNA = ("Laguna", "full")
MINIMAX = ("MiniMaxM2", "all turn")
HUNYUAN = ("HunYuanMoEV1", "experts")
ERNIE = ("Ernie4_5_Moe", "experts")
MLA_GROUPS = ("DeepseekV3", "groups")
FALCON = ("Falcon", "two norms")
# A config of VARIANTS, what is changed in it, and words of the refusal.
VALUES: list[tuple[tuple[str, str], dict[str, Any], list[str]]] = [
    (
        ("Mixtral", "experts"),
        {"num_experts_per_tok": 5},
        ["num_experts_per_tok", "at most num_local_experts = 4"],
    ),
    (
        ("Qwen3Moe", "experts"),
        {"num_experts_per_tok": 7},
        ["num_experts_per_tok", "at most num_experts = 6"],
    ),
    (("GptOss", "alternate"), {"num_experts_per_tok": 0}, ["num_experts_per_tok"]),
    (MLA_GROUPS, {"n_group": 3}, ["n_group", "a divisor of n_routed_experts = 8"]),
    (MLA_GROUPS, {"topk_group": 5}, ["topk_group", "at most n_group = 4"]),
    (
        MLA_GROUPS,
        {"topk_group": 1, "num_experts_per_tok": 3},
        ["topk_group", "num_experts_per_tok = 3"],
    ),
    (MLA_GROUPS, {"n_group": 8, "topk_group": 4}, ["n_group", "two experts"]),
    (MLA_GROUPS, {"scoring_func": "softmax"}, ["router", "scoring_func", "'sigmoid' is"]),
    (MLA_GROUPS, {"topk_method": "hash"}, ["topk_method 'hash'", "'noaux_tc'"]),
    (MLA_GROUPS, {"moe_layer_freq": 2}, ["moe_layer_freq 2", "1 is"]),
    (
        ("Qwen3Moe", "experts"),
        {"topk_method": "hash"},
        ["router", "'hash'", "'greedy'"],
    ),
    (
        MLA_GROUPS,
        {"rope_parameters": {"rope_type": "spiral"}},
        ["'spiral'", "linear, llama3 and yarn"],
    ),
    (MLA_GROUPS, {"qk_rope_head_dim": 7}, ["qk_rope_head_dim", "even"]),
    (
        ("Glm4Moe", "experts"),
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.1}},
        ["partial_rotary_factor", "a quarter of 16"],
    ),
    (
        ("MiMoV2Flash", "plain"),
        {"v_head_dim": 32},
        ["v_head_dim", "at most head_dim = 24"],
    ),
    (
        ("MiMoV2Flash", "plain"),
        {"num_key_value_heads": 4},
        ["num_key_value_heads", "layers with a window"],
    ),
    (
        ("MiMoV2Flash", "plain"),
        {"attention_chunk_size": 64},
        ["attention_chunk_size 64", "128 is"],
    ),
    (
        ("Qwen3Next", "plain"),
        {"layer_types": ["linear_attention", "mamba", "conv", "full_attention"]},
        ["layer_types conv, mamba are not supported", "full_attention, linear_attention"],
    ),
    (
        ("NemotronH", "dense"),
        {"layers_block_type": None, "hybrid_override_pattern": "M-*X"},
        ["hybrid_override_pattern X are not supported", "M, *, -, E are"],
    ),
    (
        ("NemotronH", "dense"),
        {"layers_block_type": "M-*M"},
        ["layers_block_type", "the kind of each layer"],
    ),
    (("NemotronH", "dense"), {"n_groups": 3}, ["n_groups", "mamba_num_heads = 8"]),
    (("NemotronH", "dense"), {"mamba_hidden_act": "gelu"}, ["mamba_hidden_act 'gelu'"]),
    (
        ("FalconH1", "plain"),
        {"ssm_multipliers": [1.0, 2.0]},
        ["ssm_multipliers", "a list of 5 positive numbers"],
    ),
    (("FalconH1", "plain"), {"key_multiplier": -1.0}, ["key_multiplier", "positive"]),
    (
        ("GraniteMoeHybrid", "experts"),
        {"time_step_limit": [0.5, 0.1]},
        ["time_step_limit", "the smallest and the largest step"],
    ),
    (
        ("GraniteMoeHybrid", "experts"),
        {"mamba_d_head": 24},
        ["mamba_d_head", "8 heads have 128 dimensions (mamba_expand times hidden_size)"],
    ),
    (("Lfm2", "plain"), {"conv_L_cache": 1}, ["conv_L_cache", "at least 2"]),
    (
        ("Qwen3Next", "plain"),
        {"layer_types": ["linear_attention"] * 4},
        ["layer_types: no layer has an attention", "Qwen3NextForCausalLM"],
    ),
    (
        ("Qwen3_5Moe", "plain"),
        {"layer_types": None, "full_attention_interval": 100},
        ["full_attention_interval: no layer has an attention"],
    ),
    (("Lfm2", "plain"), {"layer_types": ["rwkv"] * 4}, ["layer_types rwkv are not"]),
    (
        ("NemotronH", "dense"),
        {"layers_block_type": None, "hybrid_override_pattern": "MX*-"},
        ["hybrid_override_pattern X are not supported"],
    ),
    (("NemotronH", "dense"), {"layers_block_type": []}, ["layers_block_type", "one at"]),
    (
        ("NemotronH", "dense"),
        {"layers_block_type": None, "num_hidden_layers": None},
        ["layers_block_type", "a list of the kind of each layer"],
    ),
    (
        ("NemotronH", "dense"),
        {"layer_types": ["linear_attention", "full_attention"]},
        ["layer_types says other kinds of layers than layers_block_type"],
    ),
    (("NemotronH", "dense"), {"tie_word_embeddings": True}, ["tie_word_embeddings"]),
    (
        ("FalconH1", "plain"),
        {"layer_types": ["full_attention"] * 3},
        ["layer_types says other kinds", "'both'", "leave layer_types out"],
    ),
    (("FalconH1", "plain"), {"attn_layer_indices": [0]}, ["attn_layer_indices [0]"]),
    (
        ("GraniteMoeHybrid", "experts"),
        {"position_embedding_type": "alibi"},
        ["position_embedding_type 'alibi'", "'nope'"],
    ),
    (
        ("GraniteMoeHybrid", "experts"),
        {"mamba_hidden_act": "gelu"},
        ["mamba_hidden_act 'gelu'"],
    ),
    (("KimiLinear", "plain"), {"tie_word_embeddings": True}, ["tie_word_embeddings"]),
    (("KimiLinear", "plain"), {"mla_use_nope": False}, ["mla_use_nope False", "True is"]),
    (("KimiLinear", "plain"), {"topk_method": "greedy"}, ["topk_method 'greedy'"]),
    (
        ("KimiLinear", "plain"),
        {"linear_attn_config": {"gate_lower_bound": -5.0}},
        ["linear_attn_config: gate_lower_bound", "short_conv_kernel_size"],
    ),
    (
        ("KimiLinear", "plain"),
        {"linear_attn_config": {"num_heads": "many"}},
        ["linear_attn_config.num_heads", "found 'many'"],
    ),
    (
        ("KimiLinear", "plain"),
        {"linear_attn_config": 3},
        ["linear_attn_config", "object"],
    ),
    (
        ("KimiLinear", "plain"),
        {
            "layer_types": None,
            "linear_attn_config": {"full_attn_layers": [1, 5], "kda_layers": [2, 3, 4]},
        },
        ["linear_attn_config.full_attn_layers", "1 to num_hidden_layers = 4"],
    ),
    (
        ("KimiLinear", "plain"),
        {
            "layer_types": None,
            "linear_attn_config": {"full_attn_layers": [1], "kda_layers": [2, 3]},
        },
        ["layer_types", "or layer 4 in linear_attn_config.full_attn_layers"],
    ),
    (
        ("KimiLinear", "plain"),
        {"linear_attn_config": {"full_attn_layers": [1], "kda_layers": [2, 3, 4]}},
        ["linear_attn_config.kda_layers say other kinds of layers than layer_types"],
    ),
    (
        ("KimiLinear", "plain"),
        {"model_max_length": "long"},
        ["model_max_length", "found 'long'"],
    ),
    (("Jamba", "plain"), {"attn_layer_offset": 2}, ["attn_layer_offset", "less than"]),
    (("Jamba", "plain"), {"attn_layer_period": 0}, ["attn_layer_period", "at least 1"]),
    (
        ("Jamba", "plain"),
        {"attn_layer_period": 9, "attn_layer_offset": 8},
        ["attn_layer_period: no layer has an attention"],
    ),
    (("Jamba", "plain"), {"mamba_dt_rank": "big"}, ["mamba_dt_rank", "found 'big'"]),
    (
        ("Jamba", "plain"),
        {"layers_block_type": ["mamba"] * 4},
        ["layers_block_type says other kinds of layers than attn_layer_period"],
    ),
    (
        ("Qwen3Next", "plain"),
        {"layer_types": ["full_attention"] * 3},
        ["layer_types", "num_hidden_layers = 4"],
    ),
    (
        ("Qwen3_5", "plain"),
        {"linear_num_value_heads": 5},
        ["linear_num_value_heads", "a multiple of linear_num_key_heads = 2"],
    ),
    (("Llama4", "chunks"), {"sliding_window": 8}, ["sliding_window is not known"]),
    (("Llama4", "chunks"), {"attention_chunk_size": 1}, ["attention_chunk_size", "2"]),
    (("Llama4", "chunks"), {"attn_temperature_tuning": "yes"}, ["attn_temperature"]),
    (("Llama4", "chunks"), {"floor_scale": 0}, ["floor_scale"]),
    (("Llama4", "chunks"), {"no_rope_layers": [1, 0]}, ["no_rope_layers", "at least"]),
    (
        ("Llama4", "chunks"),
        {"layer_types": ["sliding_attention"] * 4},
        ["layer_types ['sliding_attention'] are not known"],
    ),
    (
        ("Llama4", "listed"),
        {"attention_chunk_size": None},
        ["layer_types", "attention_chunk_size"],
    ),
    (
        ("Mistral", "plain"),
        {"layer_types": ["chunked_attention"] * 3},
        ["layer_types ['chunked_attention'] are not known"],
    ),
    (
        ("Mistral4", "experts"),
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        ["qk_rope_head_dim", "partial_rotary_factor (0.5) of 20"],
    ),
    (("Mistral4", "experts"), {"topk_method": "noaux_tc"}, ["topk_method 'noaux_tc'"]),
    (
        ("Ministral3", "scaled queries"),
        {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": -1.0}},
        ["rope_parameters", "llama_4_scaling_beta", "positive"],
    ),
    (
        ("Ministral3", "scaled queries"),
        {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}},
        ["rope_parameters", "original_max_position_embeddings", "nothing"],
    ),
    (
        ("Mistral", "plain"),
        {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}},
        ["llama_4_scaling_beta is not a key"],
    ),
    (("Gemma2", "caps"), {"attn_logit_softcapping": 0.0}, ["attn_logit_softcapping"]),
    (("Gemma2", "caps"), {"final_logit_softcapping": -3}, ["final_logit_softcapping"]),
    (("Gemma2", "caps"), {"sliding_window_pattern": 3}, ["sliding_window_pattern", "2"]),
    (
        ("Gemma2", "caps"),
        {"use_bidirectional_attention": True},
        ["use_bidirectional_attention"],
    ),
    (("Gemma4", "experts"), {"top_k_experts": 7}, ["top_k_experts", "at most num_exp"]),
    (("Gemma4", "experts"), {"num_experts": None}, ["num_experts", "an integer"]),
    (("Gemma4", "experts"), {"enable_moe_block": 1}, ["enable_moe_block", "true or"]),
    (("Gemma3", "pattern"), {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping"]),
    (("Gemma3n", "plain"), {"altup_num_inputs": 1}, ["altup_num_inputs", "least 2"]),
    (
        ("Gemma3n", "plain"),
        {"altup_active_idx": 3},
        ["altup_active_idx", "below altup_num_inputs = 3"],
    ),
    (
        ("Gemma3n", "plain"),
        {"altup_correct_scale": 1},
        ["altup_correct_scale", "true or"],
    ),
    (("Gemma3n", "plain"), {"laurel_rank": 0}, ["laurel_rank", "at least 1"]),
    (
        ("Gemma3n", "plain"),
        {"hidden_size_per_layer_input": 0},
        ["hidden_size_per_layer_input", "at least 1"],
    ),
    (
        ("Gemma3n", "plain"),
        {"intermediate_size": [96, 64]},
        ["intermediate_size", "num_hidden_layers = 3"],
    ),
    (
        ("Gemma3n", "plain"),
        {"intermediate_size": [96, 64, 0]},
        ["intermediate_size", "at least 1"],
    ),
    (
        ("Llama", "plain"),
        {"intermediate_size": [96] * 3},
        ["intermediate_size", "an int"],
    ),
    *(
        (
            ("Gemma3n", "plain"),
            {"activation_sparsity_pattern": pattern},
            ["activation_sparsity_pattern", "num_hidden_layers = 3", "below 1"],
        )
        for pattern in ([0.5], [0.5, 1, 0.0], [0.5, -0.1, 0.0], [True, 0.0, 0.0], 0.95)
    ),
    (
        ("Gemma3n", "shared keys"),
        {"num_kv_shared_layers": 5},
        ["num_kv_shared_layers", "a layer of each kind"],
    ),
    (("Gemma3n", "plain"), {"sliding_window_pattern": 6}, ["sliding_window_pattern 6"]),
    (("Gemma3n", "plain"), {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping"]),
    (("Gemma3n", "plain"), {"hidden_activation": "gelu"}, ["hidden_activation 'gelu'"]),
    (("GptOss", "alternate"), {"swiglu_limit": 8.0}, ["swiglu_limit 8.0", "7 is"]),
    (("Llama", "plain"), {"num_key_value_heads": 3}, ["a divisor of", "heads = 4"]),
    (FALCON, {"alibi": True}, ["alibi True"]),
    (FALCON, {"activation": "relu"}, ["activation 'relu'", "only 'gelu' is"]),
    (FALCON, {"num_ln_in_parallel_attn": 3}, ["num_ln_in_parallel_attn 3", "1 or 2 is"]),
    (FALCON, {"parallel_attn": False}, ["parallel_attn False", "True is"]),
    (FALCON, {"parallel_attn": "yes"}, ["parallel_attn", "true or false", "'yes'"]),
    (FALCON, {"num_kv_heads": 3}, ["num_kv_heads", "a divisor of", "heads = 4"]),
    (FALCON, {"ffn_hidden_size": 0}, ["ffn_hidden_size", "at least 1"]),
    (FALCON, {"head_dim": 32}, ["head_dim 32"]),
    (FALCON, {"n_embed": 128}, ["n_embed 128"]),
    (
        ("Falcon", "one key head"),
        {"num_ln_in_parallel_attn": 2},
        ["num_ln_in_parallel_attn 2", "1 and null are"],
    ),
    (("StableLm", "plain"), {"layer_norm_eps": 0}, ["layer_norm_eps", "positive"]),
    (("StableLm", "plain"), {"hidden_act": "gelu"}, ["hidden_act 'gelu'", "'silu' is"]),
    (("StableLm", "plain"), {"use_parallel_residual": 1}, ["use_parallel_residual"]),
    (("StableLm", "plain"), {"partial_rotary_factor": 2.0}, ["partial_rotary_factor"]),
    (("Phi", "plain"), {"qk_layernorm": True}, ["qk_layernorm True", "False is"]),
    (("Phi", "plain"), {"hidden_act": "gelu"}, ["hidden_act 'gelu'", "gelu_new"]),
    (("Cohere", "plain"), {"logit_scale": "high"}, ["logit_scale", "positive"]),
    (("Cohere2", "pattern"), {"sliding_window_pattern": 0}, ["sliding_window_pattern"]),
    (
        ("GptOss", "alternate"),
        {"sliding_window_pattern": 3},
        ["sliding_window_pattern 3"],
    ),
    (("Olmo3", "windows"), {"sliding_window_pattern": 3}, ["sliding_window_pattern 3"]),
    (("Granite", "plain"), {"attention_multiplier": None}, ["attention_multiplier"]),
    (("DeepseekV3", "groups"), {"head_dim": True}, ["head_dim", "an integer"]),
    (("DeepseekV3", "groups"), {"head_dim": 4}, ["head_dim", "null or 8"]),
    (("Mistral4", "groups"), {"head_dim": 8}, ["head_dim", "null or 20"]),
    (("Dots1", "experts"), {"topk_method": "greedy"}, ["topk_method 'greedy'"]),
    (
        ("Cohere2", "pattern"),
        {"partial_rotary_factor": 0.5},
        ["partial_rotary_factor 0.5"],
    ),
    (LAGUNA, {"gating": False}, ["gating", "'per-head' or 'per-element'"]),
    (LAGUNA, {"gating": "per-layer"}, ["gating", "'per-head' or 'per-element'"]),
    (
        LAGUNA,
        {"num_attention_heads_per_layer": [4, 4]},
        ["num_attention_heads_per_layer", "num_hidden_layers = 3 multiples"],
    ),
    (
        LAGUNA,
        {"num_attention_heads_per_layer": [4, 3, 4]},
        ["num_attention_heads_per_layer", "num_key_value_heads = 2"],
    ),
    (LAGUNA, {"moe_router_logit_softcapping": -1.0}, ["moe_router_logit_softcapping"]),
    (LAGUNA, {"moe_apply_router_weight_on_input": True}, ["moe_apply_router_weight"]),
    (LAGUNA, {"rope_scaling": {"rope_type": "linear"}}, ["rope_scaling", "None is"]),
    (LAGUNA, {"mlp_layer_types": ["dense"]}, ["mlp_layer_types", "= 3"]),
    (MINIMAX, {"rotary_dim": 17}, ["rotary_dim", "at most head_dim = 16"]),
    (MINIMAX, {"rotary_dim": 6}, ["partial_rotary_factor", "a quarter of 16"]),
    (MINIMAX, {"scoring_func": "softmax"}, ["scoring_func", "'sigmoid' is"]),
    (ERNIE, {"moe_k": 9}, ["moe_k", "at most moe_num_experts = 8"]),
    (HUNYUAN, {"moe_topk": [1, 2]}, ["moe_topk", "num_hidden_layers = 3 integers"]),
    (HUNYUAN, {"moe_topk": [1, 0, 2]}, ["moe_topk", "at least 1"]),
    (HUNYUAN, {"moe_topk": [1, 7, 2]}, ["moe_topk", "at most num_experts = 6"]),
    (HUNYUAN, {"num_experts": [6, 6, 6]}, ["num_experts", "an integer"]),
    (HUNYUAN, {"use_cla": True}, ["use_cla True", "False is"]),
    (HUNYUAN, {"rope_parameters": DYNAMIC | {"alpha": -1.0}}, ["alpha", "positive"]),
    (HUNYUAN, {"rope_parameters": DYNAMIC | {"alpha": 2, "beta": 1}}, ["beta", "alpha"]),
    (HUNYUAN, {"rope_parameters": DYNAMIC}, ["'dynamic'", "linear, llama3 and yarn"]),
    (("Llama", "plain"), {"rope_parameters": DYNAMIC | {"alpha": 2.0}}, ["'dynamic'"]),
    (ERNIE, {"moe_layer_start_index": [1, 2]}, ["moe_layer_start_index", "an integer"]),
    (ERNIE, {"moe_layer_end_index": -2}, ["moe_layer_end_index", "at least -1"]),
    (ERNIE, {"moe_layer_interval": 0}, ["moe_layer_interval", "at least 1"]),
    (ERNIE, {"moe_norm_min": 0}, ["moe_norm_min", "a positive number"]),
    (ERNIE, {"use_bias": 1}, ["use_bias", "true or false"]),
]


@pytest.mark.parametrize(("kind", "architecture", "words"), MODELS)
def test_kinds_of_models_are_named(
    kind: str, architecture: str, words: list[str]
) -> None:
    """By either of the two fields that tell the kind."""
    for config in (
        {"model_type": kind, "architectures": [architecture]},
        {"architectures": [architecture]},
        {"model_type": kind},
    ):
        with pytest.raises(UnsupportedModelError) as caught:
            parse_spec(config, "model/config.json")
        for word in words:
            assert word in str(caught.value)


@pytest.mark.parametrize(
    "architecture",
    ["LlamaForCausalLMEagle3", "Eagle3Speculator", "EagleLlamaForCausalLM"],
)
def test_a_draft_head_is_no_model(architecture: str) -> None:
    config = {"model_type": "llama", "architectures": [architecture]}
    with pytest.raises(UnsupportedModelError, match=f"{architecture} is a draft head"):
        parse_spec(config)


def test_no_kind_that_works_is_refused() -> None:
    assert not KINDS.keys() & BY_MODEL_TYPE.keys()


@pytest.mark.parametrize(("name", "quantization", "scheme"), QUANTIZED)
def test_published_quantized_checkpoints_are_read(
    name: str, quantization: dict[str, Any], scheme: str
) -> None:
    spec = parse_spec({**PUBLISHED[name], "quantization_config": quantization})
    assert spec.quantization is not None
    assert spec.quantization.format.scheme.name == scheme


def test_other_ways_to_quantize_are_named_with_what_works() -> None:
    quantization = {"quant_method": "bitsandbytes"}
    with pytest.raises(UnsupportedModelError, match="bitsandbytes") as caught:
        parse_spec({**PUBLISHED["gemma-3-4b-it"], "quantization_config": quantization})
    assert "awq" in str(caught.value)
    assert "--quantization" in str(caught.value)


def test_kimi_k2_is_deepseek_v3_with_other_sizes() -> None:
    as_v3 = {**PUBLISHED["Kimi-K2"], "model_type": "deepseek_v3"}
    spec = parse_spec(PUBLISHED["Kimi-K2"])
    assert spec == parse_spec(as_v3)
    assert spec.family is FAMILIES["DeepseekV3ForCausalLM"]


@pytest.mark.parametrize(("key", "changes", "words"), VALUES)
def test_values_that_cannot_be_are_named_with_what_can(
    key: tuple[str, str], changes: dict[str, Any], words: list[str]
) -> None:
    config = {"architectures": [f"{key[0]}ForCausalLM"], **VARIANTS[key]}
    parse_spec(config)
    with pytest.raises((ModelConfigError, UnsupportedModelError)) as caught:
        parse_spec({**config, **changes}, "model/config.json")
    for word in [*words, "model/config.json"]:
        assert word in str(caught.value)


@pytest.mark.long
def test_a_known_familys_refusal_is_the_one_that_is_shown(tmp_path: Path) -> None:
    """Not that of transformers' own class, which is tried next."""
    config = {"architectures": ["DeepseekV3ForCausalLM"], **VARIANTS[MLA_GROUPS]}
    config |= {"model_type": "deepseek_v3", "moe_layer_freq": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="moe_layer_freq 2"):
        prepare(EngineArgs(model=str(tmp_path), kv_cache_memory_bytes=1 << 20))


@pytest.mark.parametrize(
    ("key", "changes", "words"),
    [
        (("Llama", "plain"), {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        (("Llama", "plain"), {"rms_norm_eps": 0}, "rms_norm_eps"),
        (("Llama", "plain"), {"num_key_value_heads": 3}, "num_key_value_heads"),
        (("Llama", "plain"), {"layer_types": ["full_attention"]}, "layer_types"),
        (("Qwen2", "plain"), {"rope_theta": -1.0}, "rope_theta"),
        (("Mixtral", "experts"), {"num_experts_per_tok": 5}, "num_experts_per_tok"),
        (
            ("Mixtral", "experts"),
            {"sliding_window": 8, "layer_types": [*ALTERNATING]},
            "layer_types",
        ),
        (("Llama", "plain"), {"sliding_window": 8}, "sliding_window"),
    ],
)
def test_a_known_familys_wrong_value_is_not_tried_elsewhere(
    tmp_path: Path, key: tuple[str, str], changes: dict[str, Any], words: str
) -> None:
    save(str(tmp_path), key[0], VARIANTS[key])
    config = json.loads((tmp_path / "config.json").read_text())
    config = {k: v for k, v in config.items() if k != "rope_parameters"} | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=words) as caught:
        prepare(EngineArgs(model=str(tmp_path), kv_cache_memory_bytes=1 << 20))
    assert "logits" not in str(caught.value)


@pytest.mark.parametrize("warns", [True, False])
def test_the_log_says_why_transformers_model_runs(
    tmp_path: Path, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    save(str(tmp_path), "Llama", VARIANTS["Llama", "plain"])
    config = json.loads((tmp_path / "config.json").read_text()) | {"hidden_act": "gelu"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = EngineArgs(model=str(tmp_path), kv_cache_memory_bytes=1 << 20)
    prepare(args, warns=warns)
    logged = [
        record.getMessage() for record in caplog.records if record.name == "minfer.model"
    ]
    assert len(logged) == warns
    assert all("LlamaForCausalLM of transformers runs" in message for message in logged)
    assert all("hidden_act 'gelu' is not supported" in message for message in logged)


@pytest.mark.parametrize(
    ("lost", "extra", "words"),
    [
        ("model.layers.1.mlp.experts.5.up_proj.weight", "", ["missing", "incomplete"]),
        ("model.layers.2.mlp.gate.weight", "", ["missing", "incomplete"]),
        ("", "model.layers.1.mlp.experts.6.up_proj.weight", ["unexpected"]),
        (
            "",
            "model.layers.1.mlp.experts.5.up_proj.weight_scale_inv",
            ["quantization_config"],
        ),
        ("", "model.layers.1.mlp.experts.gate_up_proj_blocks", [HOW]),
        (
            "",
            "model.layers.0.self_attn.q_proj.qweight",
            ["quantized", "quantization_config"],
        ),
    ],
)
def test_tensors_of_experts_are_all_there(
    tmp_path: Path, lost: str, extra: str, words: list[str]
) -> None:
    save(str(tmp_path), "Qwen3Moe", VARIANTS["Qwen3Moe", "experts"])
    tensors = load_file(tmp_path / "model.safetensors")
    if extra:
        tensors[extra] = next(iter(tensors.values())).clone()
    tensors.pop(lost, None)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        load_weights(tmp_path, read_spec(tmp_path))
    for word in [*words, lost or extra, str(tmp_path)]:
        assert word in str(caught.value)


def test_a_model_with_fewer_experts_than_its_config_says_is_named(tmp_path: Path) -> None:
    save(str(tmp_path), "Qwen3Moe", VARIANTS["Qwen3Moe", "experts"])
    spec = read_spec(tmp_path)
    with pytest.raises(CheckpointError, match=r"experts\.6\.gate_proj.*incomplete"):
        load_weights(tmp_path, with_feed_forward(spec, experts=8))

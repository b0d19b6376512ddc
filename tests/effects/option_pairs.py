"""The options that change the forward of each family, and configs with all pairs of
them.
"""

import random
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any, Final

from tests.effects.tiny_families import ALPHA, ROPES, VARIANTS, WINDOW

Option = Sequence[Mapping[str, Any]]  # values that exclude one another

_BIAS: Final[Option] = ({}, {"attention_bias": True})
_TIED: Final[Option] = ({"tie_word_embeddings": False}, {"tie_word_embeddings": True})
_EPS: Final[Option] = ({}, {"rms_norm_eps": 1e-2})
_DIM: Final[Option] = ({}, {"head_dim": 32})
_HEADS: Final[Option] = tuple({"num_key_value_heads": count} for count in (2, 4, 1))
_ROPE: Final[Option] = tuple(
    {"rope_parameters": ROPES[name]} for name in ("default", "linear", "llama3", "yarn")
)
_EVERY: Final = (_TIED, _EPS, _HEADS, _ROPE)
_LAYER_NORM: Final[tuple[Option, ...]] = (
    _TIED,
    ({}, {"layer_norm_eps": 1e-2}),
    _HEADS,
    _ROPE,
)
_WINDOW: Final[Option] = ({}, {"sliding_window": WINDOW}, {"sliding_window": 7})
_QWEN_WINDOW: Final[Option] = (
    {},
    {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3},
)
_MIXED: Final[Option] = ({}, {"layer_types": ["full_attention", "sliding_attention"] * 2})
_SLIDING: Final = ["full_attention", *["sliding_attention"] * 2, "full_attention"]
_GEMMA4_EXPERTS: Final = {
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 3,
    "moe_intermediate_size": 24,
}
_INPUTS: Final = {"hidden_size_per_layer_input": 12}
_QWEN_MIXED: Final = {**_QWEN_WINDOW[2], **_MIXED[1]}
_UNROTATED_WINDOW: Final[Option] = tuple(
    {"use_sliding_window": window is not None, "sliding_window": window}
    for window in (None, WINDOW, 7)
)
_NORMALISED: Final[Option] = ({"norm_topk_prob": False}, {"norm_topk_prob": True})
_TOP: Final[Option] = ({}, {"num_experts_per_tok": 1}, {"num_experts_per_tok": 4})
_DENSE: Final[Option] = (
    {},
    {"mlp_only_layers": [1]},
    {"decoder_sparse_step": 2},
    {"mlp_only_layers": [0, 1, 2, 3]},
)
_FIRST: Final[Option] = tuple({"first_k_dense_replace": count} for count in (1, 0, 4))
_SHARED: Final[Option] = ({"n_shared_experts": 2}, {"n_shared_experts": 1})
_SCALED: Final[Option] = ({"routed_scaling_factor": 1.0}, {"routed_scaling_factor": 2.5})
_GROUPS: Final[Option] = tuple(
    {"n_group": groups, "topk_group": kept_groups}
    for groups, kept_groups in ((1, 1), (4, 2), (2, 1))
)
_QUERIES: Final[Option] = ({"q_lora_rank": None}, {"q_lora_rank": 20})
_MLA_ROPE: Final[Option] = (
    {},
    {"rope_parameters": ROPES["yarn"] | {"mscale": 0.7, "mscale_all_dim": 0.9}},
    {"rope_parameters": ROPES["yarn"] | {"mscale_all_dim": 1.0}},
    {"rope_parameters": ROPES["linear"]},
)
_MLA_DIMS: Final[Option] = (
    {},
    {"qk_nope_head_dim": 16, "v_head_dim": 24, "kv_lora_rank": 16},
)
_MLA: Final = (_TIED, _EPS, _BIAS, _QUERIES, _MLA_ROPE, _MLA_DIMS, _FIRST, _SCALED)
_SCALED_ROPE: Final[Option] = tuple(
    {"rope_parameters": ROPES[name] | beta | {"original_max_position_embeddings": 8}}
    for name in ("yarn", "linear", "default")
    for beta in ({"llama_4_scaling_beta": 0.7}, {"llama_4_scaling_beta": 2.0})
)
_LIMITED: Final[Option] = tuple(
    {**groups, "topk_method": "group_limited_greedy"} for groups in _GROUPS
)
_PARTIAL: Final[Option] = tuple(
    {"rope_parameters": ROPES[name] | {"partial_rotary_factor": share}}
    for name, share in (("default", 0.5), ("yarn", 0.25), ("linear", 1.0))
)
_GLM: Final[tuple[Option, ...]] = (
    _TIED,
    _EPS,
    _HEADS,
    _PARTIAL,
    _DIM,
    ({}, {"attention_bias": False}),
)
_GRANITE_MOE: Final[tuple[Option, ...]] = (
    *_EVERY,
    _BIAS,
    _DIM,
    _TOP,
    ({}, {"residual_multiplier": 0.22}),
    ({}, {"logits_scaling": 8.0}),
)
_OWN_ROPES: Final = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
}
_OLD_FALCON: Final = {"new_decoder_architecture": False}
_ALPHA: Final[Option] = (*_ROPE, {"rope_parameters": ALPHA})
_USE_BIAS: Final[Option] = ({}, {"use_bias": True})
_ERNIE_LAYERS: Final[Option] = (
    {},
    {"moe_layer_start_index": 0, "moe_layer_end_index": 2},
    {"moe_layer_interval": 2},
    {"moe_layer_start_index": 4},
)
_SHARES: Final[Option] = tuple(
    {"rope_parameters": ROPES[name] | {"partial_rotary_factor": share}}
    for name, share in (("default", 0.25), ("linear", 0.5), ("yarn", 1.0))
)
_LINEAR, _FULL = "linear_attention", "full_attention"
_KINDS: Final[Option] = tuple(
    {"layer_types": kinds}
    for kinds in (
        [_LINEAR, _FULL] * 2,
        [_FULL, _LINEAR, _LINEAR, _FULL],
        [_LINEAR, _LINEAR, _FULL, _LINEAR],
    )
)
_DELTA: Final[tuple[Option, ...]] = (
    _TIED,
    _EPS,
    _HEADS,
    _SHARES,
    _BIAS,
    _DIM,
    (*_KINDS, {"layer_types": None, "full_attention_interval": 2}),
    ({}, {"linear_conv_kernel_dim": 3}, {"linear_conv_kernel_dim": 2}),
    (
        {},
        {"linear_num_key_heads": 1, "linear_num_value_heads": 3},
        {"linear_num_value_heads": 2},
    ),
    ({}, {"linear_key_head_dim": 16}, {"linear_value_head_dim": 8}),
)
_SHARED_WIDTH: Final[Option] = ({}, {"shared_expert_intermediate_size": 24})
_MAMBA2: Final[tuple[Option, ...]] = (
    ({}, {"mamba_d_conv": 3}, {"mamba_d_conv": 2}),
    ({}, {"mamba_n_groups": 2}, {"mamba_n_groups": 4}),
    ({}, {"mamba_d_state": 12}),
    ({}, {"mamba_conv_bias": False}),
    ({}, {"mamba_proj_bias": True}),
    ({}, {"time_step_limit": [0.3, 0.9]}),
)
_UNROTATED: Final[Option] = (
    {},
    {"position_embedding_type": "rope", "rope_parameters": ROPES["default"]},
    {"position_embedding_type": "rope", "rope_parameters": ROPES["yarn"]},
)
# The config that options change, and the options.
OPTIONS: Final[Mapping[str, tuple[str, tuple[Option, ...]]]] = {
    "Qwen2": ("plain", (*_EVERY, (*_QWEN_WINDOW, _QWEN_MIXED))),
    "Qwen3": ("plain", (*_EVERY, _BIAS, _DIM, _QWEN_WINDOW)),
    "Llama": ("plain", (*_EVERY, _BIAS, _DIM, ({}, {"mlp_bias": True}))),
    "Llama4": (
        "chunks",
        (
            *(_TIED, _EPS, _HEADS, _ROPE, _BIAS, _DIM, _TOP),
            (*({"attention_chunk_size": size} for size in (WINDOW, 7, None)),),
            ({}, {"use_qk_norm": False}),
            ({}, {"no_rope_layers": [0, 1, 0, 1]}, {"no_rope_layer_interval": 1}),
            ({}, {"moe_layers": [1]}, {"interleave_moe_layer_step": 2}),
            ({}, {"attn_temperature_tuning": False}, {"attn_scale": 0.3}),
            ({}, {"floor_scale": 3}),
        ),
    ),
    "MiMoV2Flash": (
        "plain",
        (
            *(_TIED, _EPS, _BIAS, _GROUPS, _NORMALISED, _SCALED, _TOP, _WINDOW[1:]),
            tuple({"num_key_value_heads": count} for count in (2, 1)),
            ({}, {"v_head_dim": 24}, {"v_head_dim": 8}),
            ({}, {"attention_value_scale": None}, {"attention_value_scale": 1.7}),
            ({}, {"mlp_layer_types": ["sparse", "dense"] * 2}),
            _MIXED,
        ),
    ),
    "Mistral": ("plain", (*_EVERY, _DIM, _WINDOW)),
    "Ministral": ("windows", (*_EVERY, _DIM, _WINDOW, _MIXED)),
    "Ministral3": (
        "scaled queries",
        (_TIED, _EPS, _HEADS, _DIM, _WINDOW, _SCALED_ROPE),
    ),
    "Mistral4": (
        "experts",
        (
            *(_TIED, _EPS, _BIAS, _QUERIES, _SCALED_ROPE[:4], _MLA_DIMS, _FIRST),
            *(_SCALED, _GROUPS, _NORMALISED, _SHARED, ({}, {"rope_interleave": False})),
        ),
    ),
    "Mixtral": ("experts", (*_EVERY, _DIM, _WINDOW, _TOP)),
    "Qwen2Moe": (
        "experts",
        (
            *_EVERY,
            _QWEN_WINDOW,
            _NORMALISED,
            _TOP,
            _DENSE,
            ({}, {"qkv_bias": False}),
            ({}, {"shared_expert_intermediate_size": 8}),
        ),
    ),
    "Qwen3Moe": (
        "experts",
        (*_EVERY, _BIAS, _DIM, _QWEN_WINDOW, _NORMALISED, _TOP, _DENSE),
    ),
    "Glm4Moe": (
        "experts",
        (
            _TIED,
            _EPS,
            _HEADS,
            _PARTIAL,
            _BIAS,
            _DIM,
            ({}, {"use_qk_norm": True}),
            _NORMALISED,
            _GROUPS,
            _FIRST,
            _SHARED,
            _SCALED,
        ),
    ),
    "DeepseekV2": ("greedy", (*_MLA, ({}, *_LIMITED), _SHARED, ({}, {"mlp_bias": True}))),
    "DeepseekV3": (
        "groups",
        (*_MLA, _GROUPS, _NORMALISED, _SHARED, ({}, {"rope_interleave": False})),
    ),
    "Dots1": (
        "experts",
        (
            *_EVERY,
            _BIAS,
            _DIM,
            _NORMALISED,
            _GROUPS,
            _FIRST,
            _SHARED,
            _SCALED,
            ({}, {"sliding_window": 7, "max_window_layers": 2}),
        ),
    ),
    "SolarOpen": (
        "experts",
        (*_EVERY, _BIAS, _DIM, _NORMALISED, _GROUPS, _SHARED, _SCALED),
    ),
    "Laguna": (
        "full",
        (
            *_EVERY[:3],
            _BIAS,
            _DIM,
            _TOP,
            _MIXED,
            ({}, {"gating": "per-head"}, {"gating": "per-element"}),
            ({}, {"num_attention_heads_per_layer": [4, 8, 8, 4]}),
            ({}, {"mlp_layer_types": ["sparse", "dense"] * 2}),
            ({}, {"moe_router_logit_softcapping": 0.7}),
            ({}, {"moe_routed_scaling_factor": 2.5}),
            ({}, {"rope_parameters": _OWN_ROPES}),
        ),
    ),
    "MiniMaxM2": (
        "all turn",
        (
            *_EVERY[:3],
            (*_PARTIAL, {"rotary_dim": 12}, {"partial_rotary_factor": 0.5}),
            _DIM,
            _TOP,
            ({}, {"num_local_experts": 7}),
        ),
    ),
    "HunYuanDenseV1": ("plain", (*_EVERY[:3], _ALPHA, _BIAS, _DIM)),
    "HunYuanMoEV1": (
        "experts",
        (
            *_EVERY[:3],
            _ALPHA,
            _BIAS,
            _DIM,
            ({}, {"moe_topk": 1}, {"moe_topk": [1, 2, 3, 4]}),
            ({}, {"num_experts": 5}),
        ),
    ),
    "Ernie4_5": ("tied", (*_EVERY, _DIM, _USE_BIAS)),
    "Ernie4_5_Moe": (
        "experts",
        (
            *_EVERY,
            _USE_BIAS,
            _ERNIE_LAYERS,
            ({}, {"moe_k": 1}, {"moe_k": 4}),
            tuple({"moe_num_shared_experts": count} for count in (2, 0, 1)),
            ({}, {"moe_norm_min": 0.5}),
        ),
    ),
    "GptOss": (
        "alternate",
        (
            *_EVERY[:3],
            ({}, *_ROPE),
            ({}, {"attention_bias": False}),
            _WINDOW,
            _MIXED,
            _TOP,
            _DIM,
        ),
    ),
    "Gemma2": (
        "caps",
        (
            *_EVERY,
            _BIAS,
            _DIM,
            _WINDOW,
            _MIXED,
            ({}, {"query_pre_attn_scalar": 9}),
            ({}, {"attn_logit_softcapping": None}, {"attn_logit_softcapping": 5.0}),
            ({}, {"final_logit_softcapping": None}, {"final_logit_softcapping": 9.0}),
        ),
    ),
    "Gemma3n": (
        "plain",
        (
            _TIED,
            _EPS,
            _HEADS,
            _BIAS,
            _DIM,
            _WINDOW[1:],
            (
                {"layer_types": _SLIDING},
                _MIXED[1],
                {"layer_types": ["sliding_attention", *_SLIDING[:-1]]},
            ),
            tuple({"num_kv_shared_layers": count} for count in (0, 1, 2)),
            tuple(
                {"altup_num_inputs": streams, "altup_active_idx": active}
                for streams, active in ((2, 0), (3, 1), (4, 3))
            ),
            ({}, {"altup_correct_scale": False}),
            ({}, {"laurel_rank": 20}),
            (
                {},
                {"activation_sparsity_pattern": [0.9, 0.0, 0.5, 0.2]},
                {"activation_sparsity_pattern": [0.95] * 4},
            ),
            ({}, {"intermediate_size": [96, 32, 64, 160]}),
            ({}, {"vocab_size_per_layer_input": 100}),
            ({}, {"hidden_size_per_layer_input": 32}),
            ({}, {"final_logit_softcapping": 3.0}),
            ({}, {"rope_parameters": _OWN_ROPES}),
        ),
    ),
    "Gemma4": (
        "plain",
        (
            _TIED,
            _EPS,
            _HEADS[:2],
            _BIAS,
            _WINDOW[1:],
            ({"layer_types": _SLIDING}, _MIXED[1], {"layer_types": _SLIDING[::-1]}),
            ({"global_head_dim": 32}, {"global_head_dim": 8}, {"global_head_dim": 16}),
            (
                {},
                {"attention_k_eq_v": True},
                {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
                {"num_global_key_value_heads": 4},
            ),
            # transformers cannot share keys without inputs of layers.
            (
                {},
                _INPUTS,
                _INPUTS | {"num_kv_shared_layers": 2},
                _INPUTS | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True},
            ),
            ({}, {"final_logit_softcapping": 3.0}),
            ({}, {"rope_parameters": _OWN_ROPES}),
            ({}, _GEMMA4_EXPERTS, _GEMMA4_EXPERTS | {"top_k_experts": 1}),
        ),
    ),
    "Gemma3": (
        "pattern",
        (
            *_EVERY[:3],
            _BIAS,
            _DIM,
            _WINDOW,
            _MIXED,
            ({}, {"query_pre_attn_scalar": 9}),
            ({}, {"rope_parameters": _OWN_ROPES}),
            ({}, {"final_logit_softcapping": 3.0}),
        ),
    ),
    "Granite": (
        "plain",
        (
            *_EVERY,
            _BIAS,
            _DIM,
            ({}, {"mlp_bias": True}),
            ({}, {"embedding_multiplier": 12.0}),
            ({}, {"residual_multiplier": 0.22}, {"residual_multiplier": 2.0}),
            ({"attention_multiplier": 0.25}, {"attention_multiplier": 0.1}),
            ({}, {"logits_scaling": 8.0}),
        ),
    ),
    "Olmo2": ("norms behind", (*_EVERY, _BIAS, _DIM)),
    "Olmo3": (
        "windows",
        (
            *_EVERY[:3],
            _BIAS,
            _DIM,
            _WINDOW,
            _MIXED,
            ({}, {"rope_parameters": _OWN_ROPES}),
        ),
    ),
    "Olmoe": (
        "experts",
        (*_EVERY, _BIAS, _NORMALISED, _TOP, ({}, {"num_experts": 5})),
    ),
    "Phi3": (
        "fused",
        (
            *_EVERY[:3],
            _DIM,
            _WINDOW,
            (
                {},
                {
                    "rope_parameters": {
                        "rope_type": "default",
                        "partial_rotary_factor": 0.5,
                    }
                },
                {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            ),
        ),
    ),
    "Glm": ("plain", _GLM),
    "Glm4": ("plain", _GLM),
    "SeedOss": (
        "plain",
        (
            *_EVERY,
            _DIM,
            ({}, {"attention_bias": False}),
            ({}, {"attention_out_bias": True}),
            ({}, {"mlp_bias": True}),
        ),
    ),
    "GraniteMoe": ("experts", _GRANITE_MOE),
    "GraniteMoeShared": (
        "experts",
        (*_GRANITE_MOE, ({}, {"shared_intermediate_size": 40})),
    ),
    "Cohere": (
        "plain",
        (
            *_LAYER_NORM,
            _BIAS,
            _DIM,
            ({}, {"use_qk_norm": True}),
            ({}, {"logit_scale": 1.0}),
        ),
    ),
    "Cohere2": (
        "pattern of two",
        (*_LAYER_NORM, _BIAS, _WINDOW[1:], _MIXED, ({}, {"logit_scale": 1.0})),
    ),
    "Falcon": (
        "two norms",
        (
            _TIED,
            _ROPE,
            tuple({"num_kv_heads": count} for count in (2, 4, 1)),
            ({}, {"layer_norm_epsilon": 1e-2}),
            ({"bias": True}, {"bias": False}),
            ({}, {"ffn_hidden_size": 96}),
            (
                {},
                {"num_ln_in_parallel_attn": 2},
                {"num_ln_in_parallel_attn": 1},
                _OLD_FALCON,
                _OLD_FALCON | {"multi_query": False, "num_kv_heads": 4},
                _OLD_FALCON | {"parallel_attn": False},
            ),
        ),
    ),
    "Phi": (
        "plain",
        (_TIED, ({}, {"layer_norm_eps": 1e-2}), _HEADS, _DIM, _PARTIAL),
    ),
    "Starcoder2": (
        "plain",
        (
            _TIED,
            ({}, {"norm_epsilon": 1e-2}),
            _HEADS,
            _ROPE,
            _DIM,
            _WINDOW,
            ({}, {"use_bias": False}),
        ),
    ),
    "StableLm": (
        "plain",
        (
            _TIED,
            _HEADS,
            _PARTIAL,
            ({}, {"layer_norm_eps": 1e-2}),
            ({}, {"use_qkv_bias": True}),
            ({}, {"qk_layernorm": True}),
            ({}, {"use_parallel_residual": True}),
        ),
    ),
    "Qwen3Next": (
        "plain",
        (*_DELTA, _NORMALISED, _TOP, _DENSE, _SHARED_WIDTH),
    ),
    "Qwen3_5": ("plain", _DELTA),
    "Qwen3_5Moe": ("plain", (*_DELTA, _TOP, _SHARED_WIDTH)),
    "KimiLinear": (
        "plain",
        (
            _EPS,
            _BIAS,
            _QUERIES,
            _MLA_DIMS,
            _GROUPS,
            _SCALED,
            _NORMALISED,
            _SHARED,
            ({}, {"num_experts_per_tok": 1}),
            _KINDS,
            tuple(
                {"mlp_layer_types": [*["dense"] * dense, *["sparse"] * (4 - dense)]}
                for dense in (1, 0, 4)
            ),
            ({}, {"linear_conv_kernel_dim": 3}, {"linear_conv_kernel_dim": 2}),
            ({}, {"linear_num_heads": 3}, {"linear_num_heads": 1}),
            ({}, {"linear_head_dim": 12}),
        ),
    ),
    "Jamba": (
        "plain",
        (
            _TIED,
            _EPS,
            _HEADS,
            _DIM,
            _TOP,
            tuple(
                {"attn_layer_period": period, "attn_layer_offset": offset}
                for period, offset in ((2, 1), (3, 0), (4, 2))
            ),
            tuple(
                {"expert_layer_period": period, "expert_layer_offset": offset}
                for period, offset in ((2, 1), (1, 0), (8, 7))
            ),
            ({}, {"num_experts": 5}),
            ({}, {"mamba_d_conv": 3}, {"mamba_d_conv": 2}),
            ({}, {"mamba_d_state": 5}),
            ({}, {"mamba_expand": 3}, {"mamba_expand": 1}),
            ({}, {"mamba_dt_rank": 7}, {"mamba_dt_rank": "auto"}),
            ({}, {"mamba_conv_bias": False}),
            ({}, {"mamba_proj_bias": True}),
        ),
    ),
    "GraniteMoeHybrid": (
        "experts",
        (
            *(_TIED, _EPS, _HEADS, _BIAS, _TOP, _KINDS, _UNROTATED),
            *_MAMBA2,
            ({}, {"residual_multiplier": 0.22}),
            ({}, {"logits_scaling": 8.0}),
            ({}, {"embedding_multiplier": 12.0}),
            ({}, {"shared_intermediate_size": 24}),
            ({}, {"mamba_n_heads": 16, "mamba_d_head": 12, "mamba_expand": 3}),
            ({}, {"num_local_experts": 0, "num_experts_per_tok": 0}),
        ),
    ),
    "FalconH1": (
        "plain",
        (
            *_EVERY,
            _BIAS,
            *_MAMBA2,
            ({}, {"mlp_bias": True}),
            ({}, {"projectors_bias": True}),
            (
                {},
                {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
                {"mamba_rms_norm": True, "mamba_norm_before_gate": True},
            ),
            ({}, {"mamba_d_ssm": None}, {"mamba_d_head": 12}),
            ({}, {"key_multiplier": 0.6, "lm_head_multiplier": 0.7}),
            ({}, {"attention_in_multiplier": 1.3, "attention_out_multiplier": 0.9}),
            ({}, {"ssm_multipliers": [0.7, 1.2, 1.3, 0.8, 0.6]}),
            ({}, {"ssm_in_multiplier": 1.4, "ssm_out_multiplier": 0.75}),
            ({}, {"mlp_multipliers": [0.8, 1.4], "embedding_multiplier": 3.0}),
        ),
    ),
    "NemotronH": (
        "latent experts",
        (
            _HEADS,
            _DIM,
            _GROUPS,
            _NORMALISED,
            _SCALED,
            ({"num_experts_per_tok": 3}, {"num_experts_per_tok": 1}),
            ({}, {"layer_norm_epsilon": 1e-2}),
            ({}, {"use_bias": True}),
            ({}, {"mlp_bias": False}),
            ({}, {"use_conv_bias": False}),
            ({}, {"conv_kernel": 3}, {"conv_kernel": 2}),
            ({}, {"n_groups": 1}, {"n_groups": 4}),
            ({}, {"time_step_min": 0.4}),
            ({}, {"ssm_state_size": 6}, {"mamba_head_dim": 8}),
            ({}, {"moe_latent_size": None}),
            (
                {},
                {"layers_block_type": ["full_attention", "mlp", _LINEAR, "moe"]},
                {"layers_block_type": [_LINEAR, "full_attention", "moe", _LINEAR]},
            ),
        ),
    ),
    "Lfm2": (
        "adjusted",
        (
            *(_TIED, _HEADS, _ROPE, _DIM),
            ({}, {"norm_eps": 1e-2}),
            ({}, {"conv_bias": False}),
            ({}, {"conv_L_cache": 3}, {"conv_L_cache": 2}),
            ({}, {"block_auto_adjust_ff_dim": False}),
            ({}, {"block_ffn_dim_multiplier": 1.0}, {"block_multiple_of": 8}),
            (
                {},
                {"layer_types": ["full_attention", "conv", "conv", "full_attention"]},
                {"layer_types": None, "full_attn_idxs": [2]},
            ),
        ),
    ),
    "Lfm2Moe": (
        "plain",
        (
            *(_TIED, _HEADS, _ROPE, _DIM, _NORMALISED, _TOP, _SCALED),
            ({}, {"norm_eps": 1e-2}),
            ({}, {"conv_bias": True}),
            ({}, {"conv_L_cache": 4}, {"conv_L_cache": 2}),
            ({}, {"use_expert_bias": False}),
            tuple({"num_dense_layers": count} for count in (1, 0, 4)),
            ({}, {"layer_types": ["full_attention", "conv", "conv", "full_attention"]}),
        ),
    ),
    "SmolLM3": (
        "every fourth",
        (
            *_EVERY,
            _BIAS,
            _DIM,
            _UNROTATED_WINDOW,
            ({}, {"mlp_bias": True}),
            (
                {},
                {"no_rope_layer_interval": 2},
                {"no_rope_layers": [0, 1, 0, 0]},
                {"no_rope_layers": [1] * 4},
            ),
        ),
    ),
}


def pairs(family: str) -> list[dict[str, Any]]:
    """Configs of a family in which every two values of two options occur together."""
    base, options = OPTIONS[family]
    counts = [range(len(option)) for option in options]
    left = {
        frozenset(((i, a), (j, b)))
        for i, j in combinations(range(len(options)), 2)
        for a, b in product(counts[i], counts[j])
    }
    draw, rows = random.Random(0), []
    while left:
        open_ones = sorted(map(sorted, left))
        tries = [_row(draw, counts, open_ones) for _ in range(20)]
        best = max(tries, key=lambda row: len(left & _covered(row)))
        left -= _covered(best)
        rows.append(best)
    configs = []
    for row in rows:
        config = VARIANTS[family, base] | {"num_hidden_layers": 4}
        for option, chosen in zip(options, row, strict=True):
            config |= option[chosen]
        configs.append(config)
    return configs


def _row(
    draw: random.Random, counts: list[range], left: list[list[tuple[int, int]]]
) -> list[int]:
    """Returns a value of each option, two of them a pair that is left."""
    row = [draw.choice(count) for count in counts]
    for place, value in draw.choice(left):
        row[place] = value
    return row


def _covered(row: list[int]) -> set[frozenset[tuple[int, int]]]:
    return set(map(frozenset, combinations(enumerate(row), 2)))

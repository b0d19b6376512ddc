"""Tiny random checkpoints of every row of the family table, and of architectures outside
it.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, Final

import torch
import transformers

WINDOW: Final = 20
SIZES: Final[dict[str, Any]] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "head_dim": 16,
    "eos_token_id": None,
    "initializer_range": 0.3,
    "sliding_window": None,
}
_YARN: Final = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPES: Final[Mapping[str, dict[str, Any]]] = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": _YARN,
    "yarn-mscale": _YARN | {"mscale": 0.707, "mscale_all_dim": 1.0, "truncate": False},
    "yarn-betas": _YARN | {"attention_factor": 1.3, "beta_fast": 8.0, "beta_slow": 2.0},
}
_TIED: Final = {"tie_word_embeddings": True}
_BIAS: Final = {"attention_bias": True}
_UPPER: Final = {
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "max_window_layers": 1,
}
_MIXED: Final = ["sliding_attention", "full_attention", "sliding_attention"]
# Factors of queries by position, from the 8th token on.
_SCALED: Final = {"llama_4_scaling_beta": 0.7, "original_max_position_embeddings": 8}
_SCALED_YARN: Final = (
    _YARN | _SCALED | {"factor": 16.0, "mscale": 1.0, "mscale_all_dim": 0.8}
)
_DYNAMIC: Final = {"rope_type": "dynamic", "factor": 4.0}
_NEOX: Final = {"head_dim": None, "initializer_range": 2.0}
_EXPERTS: Final = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MOE: Final = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
_OLMOE: Final = {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24}
_QWEN2_MOE: Final = _MOE | {"shared_expert_intermediate_size": 40}
_ROUTED: Final = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
_GROUPS: Final = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7}
_MLA_SIZES: Final = {
    "num_key_value_heads": 4,
    "head_dim": ...,
    "kv_lora_rank": 24,
    "q_lora_rank": None,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
_MLA: Final = _ROUTED | _MLA_SIZES
_UNTIED: Final = {"tie_word_embeddings": False}
_HALVES: Final = {"rope_interleave": False, "q_lora_rank": 20, "attention_bias": True}
_ONE_GROUP: Final = {"n_group": 1, "topk_group": 1}
_MSCALE: Final = _YARN | {"mscale": 0.707, "mscale_all_dim": 0.9}
_LATENT_QUERIES: Final = _BIAS | {"q_lora_rank": 20}
_GEMMA: Final = {"sliding_window": WINDOW, "query_pre_attn_scalar": 24}
_MULTIPLIERS: Final = {
    "attention_multiplier": 0.3,
    "logits_scaling": 4.0,
    "residual_multiplier": 0.5,
    "embedding_multiplier": 3.0,
}
_GRANITE_MOE: Final[dict[str, dict[str, Any]]] = {
    "experts": _EXPERTS | {"attention_multiplier": 0.25},
    "multipliers": _EXPERTS | _MULTIPLIERS | _BIAS,
    "one expert": _MULTIPLIERS
    | _TIED
    | {"num_local_experts": 8, "num_experts_per_tok": 1},
    "all experts": _MULTIPLIERS
    | {
        "num_local_experts": 3,
        "num_experts_per_tok": 3,
        "head_dim": 32,
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-3,
    },
}
_UNPADDED: Final = {"pad_token_id": None}
_GLM: Final[dict[str, dict[str, Any]]] = {
    "plain": _UNPADDED,
    "no biases": _UNPADDED | _TIED | {"attention_bias": False},
    "quarter": _UNPADDED
    | {
        "head_dim": 32,
        "num_key_value_heads": 4,
        "rope_parameters": ROPES["default"] | {"partial_rotary_factor": 0.25},
    },
    "yarn": _UNPADDED
    | {
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-3,
        "rope_parameters": _YARN | {"partial_rotary_factor": 0.5},
    },
    "whole": _UNPADDED
    | {"rope_parameters": ROPES["linear"] | {"partial_rotary_factor": 1.0}},
}
_PHI: Final = _UNPADDED | {"original_max_position_embeddings": 128}
# All sequences of tests are within the original context.
_LONGROPE: Final = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.0, 1.1, 1.1, 1.2, 1.3, 1.5, 1.9],
    "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0],
    "original_max_position_embeddings": 128,
}
_FALCON: Final = {"head_dim": ...}
_FALCON_40B: Final = _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}
_COHERE: Final = {"sliding_window": WINDOW}
_CAPS: Final = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
_BY_KIND: Final = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_LLAMA4: Final = {
    "num_hidden_layers": 4,
    "attention_chunk_size": WINDOW,
    "intermediate_size": 24,
    "intermediate_size_mlp": 40,
    "num_local_experts": 4,
    "floor_scale": 6,
    "attn_scale": 0.8,
}
_GEMMA4: Final = {
    "sliding_window": WINDOW,
    "layer_types": _MIXED,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 160,
}
_GEMMA4_EXPERTS: Final = {
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 3,
    "moe_intermediate_size": 24,
}
_LAYER_INPUTS: Final = {"hidden_size_per_layer_input": 12}
_GEMMA3N: Final = _LAYER_INPUTS | {
    "sliding_window": WINDOW,
    "layer_types": _MIXED,
    "vocab_size_per_layer_input": 160,
    "num_kv_shared_layers": 0,
    "laurel_rank": 8,
    "altup_num_inputs": 3,
    "initializer_range": 0.2,
}
_SHARED_KEYS: Final = {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 3,
    "layer_types": _MIXED + _MIXED,
}
_MIMO: Final = {
    "head_dim": 24,
    "v_head_dim": 16,
    "sliding_window": WINDOW,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
ALPHA: Final = {"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0}
# As published.
_OLD_ALPHA: Final = {
    "type": "dynamic",
    "alpha": 50.0,
    "factor": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
}
_LAGUNA: Final = _MOE | {
    "shared_expert_intermediate_size": 40,
    "sliding_window": WINDOW,
    "rms_norm_eps": 1e-5,
}
_HUNYUAN_MOE: Final = {"num_experts": 6, "moe_topk": 2}
_USE_BIAS: Final = {"use_bias": True}
_ERNIE: Final = {
    "moe_num_experts": 8,
    "moe_k": 3,
    "moe_intermediate_size": 24,
    "head_dim": ...,
    "tie_word_embeddings": False,
}
_RECURRENT: Final = ["linear_attention", "full_attention"]
_DELTA: Final = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "initializer_range": 0.2,
}
_FALCON_H1: Final = {
    "head_dim": ...,
    "initializer_range": 0.2,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 8,
    "mamba_d_state": 8,
}
_H1_FACTORS: Final = {
    "lm_head_multiplier": 0.7,
    "embedding_multiplier": 3.0,
    "mlp_multipliers": [0.8, 1.4],
    "key_multiplier": 0.6,
    "attention_out_multiplier": 0.9,
    "attention_in_multiplier": 1.3,
    "ssm_multipliers": [0.7, 1.2, 1.3, 0.8, 0.6],
    "ssm_in_multiplier": 1.4,
    "ssm_out_multiplier": 0.75,
}
_NEMOTRON: Final = {
    "layers_block_type": [
        "linear_attention",
        "mlp",
        "full_attention",
        "linear_attention",
    ],
    "initializer_range": 0.2,
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "ssm_state_size": 10,
    "n_groups": 2,
}
_NEMOTRON_MOE: Final = (
    _NEMOTRON
    | _ROUTED
    | {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "moe_shared_expert_intermediate_size": 40,
        "first_k_dense_replace": ...,
    }
)
_LFM2: Final = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention"] * 2,
    "head_dim": ...,
    "initializer_range": 0.2,
}
_LFM2_MOE: Final = _LFM2 | _MOE | {"num_dense_layers": 1}
_MAMBA2: Final = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "head_dim": ...,
    "mamba_n_heads": 8,
    "mamba_d_state": 8,
    "initializer_range": 0.2,
    "shared_intermediate_size": 40,
}
_GRANITE4: Final = (
    _MAMBA2 | _EXPERTS | {"intermediate_size": 24, "attention_multiplier": 0.25}
)
# Published ones are as wide as the experts: then they are one more of them.
_AS_WIDE: Final = {"shared_expert_intermediate_size": 24}
_QWEN3_NEXT: Final = _DELTA | _QWEN2_MOE
_KIMI: Final = (
    _MLA_SIZES
    | _ROUTED
    | {
        "first_k_dense_replace": ...,
        "num_hidden_layers": 4,
        "layer_types": [*_RECURRENT, *_RECURRENT],
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "n_routed_experts": ...,
        "num_local_experts": 8,
        "initializer_range": 0.2,
        "pad_token_id": None,
        "bos_token_id": None,
    }
)
_JAMBA: Final = {
    "num_hidden_layers": 4,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "head_dim": ...,
    "num_key_value_heads": 4,
    "num_experts": 4,
    "mamba_d_state": 8,
    "initializer_range": 0.2,
    "pad_token_id": None,
}
_EVERY: Final[dict[str, Any]] = {
    "plain": {},
    "tied": _TIED,
    "head_dim 32": {"head_dim": 32},
    **{f"rope {name}": {"rope_parameters": rope} for name, rope in ROPES.items()},
}
_QWEN: Final = _EVERY | {
    "windows above": _UPPER,
    "windows everywhere": _UPPER | {"max_window_layers": 0},
    "windows alternate": _UPPER | {"layer_types": _MIXED},
}
FAMILIES: Final[Mapping[str, dict[str, dict[str, Any]]]] = {
    "Qwen2": _QWEN,
    "Qwen3": _QWEN | {"attention_bias": _BIAS, "biases, windows": _BIAS | _UPPER | _TIED},
    "Llama": _EVERY
    | {
        "attention_bias": _BIAS,
        "mlp_bias": {"mlp_bias": True},
        "biases, tied": _BIAS | _TIED | {"mlp_bias": True},
    },
    "Llama4": {
        "chunks": _LLAMA4,
        "every layer rotated": _LLAMA4
        | _TIED
        | {
            "no_rope_layers": [1, 1, 1, 1],
            "moe_layers": [1, 3],
            "rope_parameters": _YARN | {"attention_factor": 1.3},
            "rms_norm_eps": 1e-2,
        },
        "listed": _LLAMA4
        | _BIAS
        | {
            "layer_types": [
                "full_attention",
                "chunked_attention",
                "chunked_attention",
                "full_attention",
            ],
            "no_rope_layers": [0, 1, 0, 1],
            "use_qk_norm": False,
            "num_experts_per_tok": 2,
            "head_dim": 32,
            "initializer_range": 0.2,
        },
        "no chunks": _LLAMA4
        | {
            "attention_chunk_size": None,
            "attn_temperature_tuning": False,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 3,
            "rope_parameters": ROPES["llama3"],
        },
        "dense": _LLAMA4
        | {"moe_layers": [], "attention_chunk_size": 8, "no_rope_layers": [1, 0, 1, 0]},
    },
    "MiMoV2Flash": {
        "plain": _MIMO,
        "listed": _MIMO
        | _BIAS
        | {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "mlp_layer_types": ["sparse", "sparse", "dense"],
            "attention_value_scale": None,
            "v_head_dim": 24,
            "num_key_value_heads": 1,
            "rope_parameters": {
                "full_attention": ROPES["llama3"] | {"partial_rotary_factor": 0.5},
                "sliding_attention": ROPES["default"] | {"partial_rotary_factor": 1.0},
            },
        },
        "groups": _MIMO
        | _TIED
        | {
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "norm_topk_prob": False,
            "attention_value_scale": 1.3,
            "rms_norm_eps": 1e-2,
            "num_hidden_layers": 6,
        },
        "window last": _MIMO
        | {
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "v_head_dim": 8,
            "num_attention_heads": 8,
        },
    },
    "Mistral": _EVERY
    | {
        "window": {"sliding_window": WINDOW},
        "window, tied": _TIED | {"sliding_window": WINDOW, "head_dim": 32},
    },
    "Ministral": {
        "windows alternate": {"sliding_window": WINDOW, "layer_types": _MIXED},
        "windows": _TIED | {"sliding_window": WINDOW, "rope_parameters": _YARN},
        "one window": {
            "sliding_window": WINDOW,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "head_dim": 32,
            "num_key_value_heads": 1,
            "rms_norm_eps": 1e-3,
        },
        "two windows": {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
            "num_key_value_heads": 4,
            "rope_parameters": ROPES["linear"],
        },
    },
    "Mixtral": {
        "experts": _EXPERTS,
        "experts, windows": _EXPERTS | {"sliding_window": WINDOW},
    },
    "Ministral3": {
        "scaled queries": {"rope_parameters": _SCALED_YARN},
        "tied, window": _TIED
        | {
            "sliding_window": WINDOW,
            "rope_parameters": ROPES["linear"] | _SCALED,
            "head_dim": 32,
        },
        "default rope": {
            "rope_parameters": ROPES["default"] | _SCALED,
            "num_key_value_heads": 1,
            "rms_norm_eps": 1e-2,
        },
        "own rope": {"max_position_embeddings": 262144},
    },
    "Mistral4": {
        "experts": _MLA_SIZES
        | _ROUTED
        | {"rope_parameters": _SCALED_YARN, "initializer_range": 0.2},
        "groups": _MLA_SIZES
        | _ROUTED
        | _GROUPS
        | _LATENT_QUERIES
        | {"rope_parameters": ROPES["linear"] | _SCALED},
        "halves, tied": _MLA_SIZES
        | _ROUTED
        | _TIED
        | {
            "rope_interleave": False,
            "norm_topk_prob": False,
            "first_k_dense_replace": 0,
            "n_shared_experts": 1,
            "rope_parameters": _SCALED_YARN,
        },
        "dense": _MLA_SIZES
        | _LATENT_QUERIES
        | {
            "first_k_dense_replace": 3,
            "moe_intermediate_size": 24,
            "qk_nope_head_dim": 16,
            "rms_norm_eps": 1e-2,
            "rope_parameters": _SCALED_YARN | {"partial_rotary_factor": 8 / 24},
        },
    },
    "Qwen2Moe": {
        "experts": _QWEN2_MOE,
        "normalised": _QWEN2_MOE | {"norm_topk_prob": True, "decoder_sparse_step": 2},
        "windows": _QWEN2_MOE | _AS_WIDE | _UPPER | {"max_window_layers": 2},
        "dense layers": _QWEN2_MOE | {"mlp_only_layers": [1], "qkv_bias": False},
    },
    "Qwen3Moe": {
        "experts": _MOE,
        "normalised": _MOE | _BIAS | {"norm_topk_prob": True},
        "windows": _MOE | _UPPER,
        "dense layers": _MOE | _TIED | {"mlp_only_layers": [0]},
    },
    "FalconH1": {
        "plain": _FALCON_H1,
        "multipliers": _FALCON_H1
        | _H1_FACTORS
        | _BIAS
        | _TIED
        | {
            "mlp_bias": True,
            "projectors_bias": True,
            "mamba_proj_bias": True,
            "mamba_d_conv": 3,
            "mamba_n_groups": 2,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "time_step_limit": [0.3, 0.9],
            "rms_norm_eps": 1e-3,
            "rope_parameters": ROPES["linear"],
        },
        "norm first": _FALCON_H1
        | _H1_FACTORS
        | {
            "mamba_d_ssm": None,
            "mamba_rms_norm": True,
            "mamba_conv_bias": False,
            "num_key_value_heads": 4,
            "rope_parameters": ROPES["llama3"],
        },
        "gated alone": _FALCON_H1
        | _H1_FACTORS
        | {"mamba_d_head": 12, "mamba_n_groups": 4, "num_hidden_layers": 2},
    },
    "NemotronH": {
        "dense": _NEMOTRON,
        "biases": _NEMOTRON
        | {
            "layers_block_type": ["mlp", "full_attention", "mlp", "linear_attention"],
            "use_bias": True,
            "mlp_bias": True,
            "use_conv_bias": False,
            "conv_kernel": 3,
            "n_groups": 1,
            "time_step_min": 0.4,
            "layer_norm_epsilon": 1e-3,
        },
        "experts": _NEMOTRON_MOE,
        "latent experts": _NEMOTRON_MOE
        | _GROUPS
        | {
            "layers_block_type": ["moe", "linear_attention", "mlp", "full_attention"],
            "moe_latent_size": 20,
            "mlp_bias": True,
            "norm_topk_prob": False,
            "num_key_value_heads": 1,
        },
    },
    "Lfm2": {
        "plain": _LFM2 | {"block_auto_adjust_ff_dim": False},
        "adjusted": _LFM2
        | {
            "tie_word_embeddings": False,
            "block_multiple_of": 40,
            "block_ffn_dim_multiplier": 1.3,
            "conv_bias": True,
            "conv_L_cache": 4,
            "norm_eps": 1e-3,
            "rope_parameters": ROPES["linear"],
        },
        "attention listed": _LFM2
        | {
            "layer_types": None,
            "full_attn_idxs": [0, 3],
            "block_multiple_of": 8,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "rope_parameters": ROPES["llama3"],
        },
        "attention alone": _LFM2 | {"layer_types": None, "block_multiple_of": 8},
    },
    "Lfm2Moe": {
        "plain": _LFM2_MOE,
        "no biases": _LFM2_MOE
        | {
            "tie_word_embeddings": False,
            "conv_bias": True,
            "conv_L_cache": 4,
            "use_expert_bias": False,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.7,
            "norm_eps": 1e-3,
            "rope_parameters": ROPES["linear"],
        },
        "all sparse": _LFM2_MOE
        | {
            "layer_types": ["full_attention", "conv", "conv", "conv"],
            "num_dense_layers": 0,
            "num_experts_per_tok": 1,
            "routed_scaling_factor": 0.6,
        },
        "yarn": _LFM2_MOE
        | {
            "layer_types": ["conv", "conv", "full_attention", "full_attention"],
            "num_dense_layers": 2,
            "head_dim": 32,
            "num_key_value_heads": 1,
            "rope_parameters": ROPES["yarn"],
        },
    },
    "GraniteMoeHybrid": {
        "experts": _GRANITE4,
        "multipliers": _GRANITE4
        | _MULTIPLIERS
        | _BIAS
        | {
            "position_embedding_type": "rope",
            "rope_parameters": ROPES["linear"],
            "mamba_n_groups": 2,
            "mamba_d_conv": 3,
            "mamba_proj_bias": True,
            "time_step_limit": [0.3, 0.9],
            "rms_norm_eps": 1e-3,
        },
        "dense": _MAMBA2
        | _TIED
        | {
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "layer_types": ["mamba", "attention", "mamba", "mamba"],
            "mamba_n_groups": 2,
            "mamba_n_heads": 16,
            "mamba_d_head": 12,
            "mamba_expand": 3,
            "mamba_conv_bias": False,
            "residual_multiplier": 0.22,
        },
        "attention alone": _MAMBA2
        | {
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "layer_types": ["attention"] * 4,
            "position_embedding_type": "rope",
            "rope_parameters": ROPES["yarn"],
        },
    },
    "KimiLinear": {
        "plain": _KIMI,
        "groups": _KIMI
        | _GROUPS
        | _LATENT_QUERIES
        | {
            "layer_types": [*_RECURRENT[::-1], *_RECURRENT[::-1]],
            "mlp_layer_types": ["sparse", "dense", "sparse", "dense"],
            "linear_conv_kernel_dim": 3,
            "linear_head_dim": 16,
            "linear_num_heads": 6,
            "n_shared_experts": 1,
            "norm_topk_prob": False,
            "rms_norm_eps": 1e-3,
        },
        "published": _KIMI
        | {
            "layer_types": ...,
            "linear_head_dim": ...,
            "linear_num_heads": ...,
            "linear_attn_config": {
                "full_attn_layers": [1, 4],
                "kda_layers": [2, 3],
                "head_dim": 12,
                "num_heads": 2,
                "short_conv_kernel_size": 2,
            },
            "first_k_dense_replace": 2,
            "qk_nope_head_dim": 16,
        },
        "all sparse": _KIMI
        | {
            "layer_types": ["full_attention", *["linear_attention"] * 3],
            "mlp_layer_types": ["sparse"] * 4,
            "num_experts_per_tok": 1,
            "routed_scaling_factor": 0.6,
        },
    },
    "Jamba": {
        "plain": _JAMBA,
        "biases": _JAMBA
        | _TIED
        | {
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "mamba_d_conv": 3,
            "mamba_dt_rank": 6,
            "mamba_expand": 3,
            "num_key_value_heads": 2,
            "num_experts_per_tok": 1,
            "rms_norm_eps": 1e-3,
        },
        "dense": _JAMBA | {"num_experts": 1, "head_dim": 32, "mamba_d_state": 16},
        "first attends": _JAMBA
        | {
            "attn_layer_period": 3,
            "attn_layer_offset": 0,
            "expert_layer_period": 3,
            "expert_layer_offset": 0,
            "num_experts_per_tok": 3,
        },
    },
    "Qwen3Next": {
        "plain": _QWEN3_NEXT,
        "listed": _QWEN3_NEXT
        | _BIAS
        | _TIED
        | {
            "layer_types": [*_RECURRENT, *_RECURRENT],
            "linear_conv_kernel_dim": 3,
            "mlp_only_layers": [2],
            "norm_topk_prob": False,
            "rms_norm_eps": 1e-3,
            "rope_parameters": ROPES["linear"] | {"partial_rotary_factor": 0.5},
        },
        "one key head": _QWEN3_NEXT
        | _AS_WIDE
        | {
            "layer_types": [*_RECURRENT[::-1], *_RECURRENT[::-1]],
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 8,
            "decoder_sparse_step": 2,
            "num_key_value_heads": 1,
        },
        "a head for each": _QWEN3_NEXT
        | {
            "layer_types": ["full_attention", *["linear_attention"] * 3],
            "linear_num_value_heads": 2,
            "head_dim": 32,
            "rope_parameters": ROPES["yarn"] | {"partial_rotary_factor": 0.25},
        },
    },
    "Qwen3_5": {
        "plain": _DELTA,
        "listed": _DELTA
        | _BIAS
        | _TIED
        | {
            "layer_types": [*_RECURRENT, *_RECURRENT],
            "linear_conv_kernel_dim": 3,
            "rms_norm_eps": 1e-3,
            "rope_parameters": ROPES["linear"] | {"partial_rotary_factor": 0.5},
        },
        "one key head": _DELTA
        | {
            "layer_types": [*_RECURRENT[::-1], *_RECURRENT[::-1]],
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 8,
            "num_key_value_heads": 1,
        },
        "sections": _DELTA
        | {
            "layer_types": ["full_attention", *["linear_attention"] * 3],
            "linear_num_value_heads": 2,
            "head_dim": 32,
            "rope_parameters": ROPES["default"]
            | {
                "partial_rotary_factor": 0.5,
                "mrope_section": [3, 3, 2],
                "mrope_interleaved": True,
            },
        },
    },
    "Qwen3_5Moe": {
        "plain": _QWEN3_NEXT,
        "listed": _QWEN3_NEXT
        | _BIAS
        | _TIED
        | {
            "layer_types": [*_RECURRENT, *_RECURRENT],
            "linear_conv_kernel_dim": 3,
            "rms_norm_eps": 1e-3,
            "rope_parameters": ROPES["linear"] | {"partial_rotary_factor": 0.5},
        },
        "one key head": _QWEN3_NEXT
        | _AS_WIDE
        | {
            "layer_types": [*_RECURRENT[::-1], *_RECURRENT[::-1]],
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 8,
            "num_key_value_heads": 1,
            "num_experts_per_tok": 1,
        },
        "sections": _QWEN3_NEXT
        | {
            "layer_types": ["full_attention", *["linear_attention"] * 3],
            "linear_num_value_heads": 2,
            "head_dim": 32,
            "rope_parameters": ROPES["yarn"]
            | {"partial_rotary_factor": 0.25, "mrope_section": [1, 2, 1]},
        },
    },
    "Glm4Moe": {
        "experts": _ROUTED,
        "groups": _ROUTED | _GROUPS | _BIAS | {"use_qk_norm": True},
        "not normalised": _ROUTED | {"norm_topk_prob": False, "head_dim": 32},
    },
    "DeepseekV2": {
        "greedy": _MLA,
        "groups": _MLA
        | _LATENT_QUERIES
        | _GROUPS
        | {"topk_method": "group_limited_greedy", "mlp_bias": True},
        "yarn": _MLA | {"rope_parameters": _MSCALE},
    },
    "DeepseekV3": {
        "groups": _MLA | _GROUPS,
        "yarn": _MLA | _LATENT_QUERIES | {"rope_parameters": _MSCALE} | _ONE_GROUP,
        "halves": _MLA | {"rope_interleave": False, "n_group": 2, "topk_group": 1},
    },
    "Glm4MoeLite": {
        "experts": _MLA | {"q_lora_rank": 20},
        "listed": _MLA
        | _GROUPS
        | _BIAS
        | {"mlp_layer_types": ["sparse", "dense", "sparse"], "q_lora_rank": 20},
    },
    "Youtu": {"tied": _MLA_SIZES | _TIED, "halves": _MLA_SIZES | _UNTIED | _HALVES},
    "Ernie4_5": {
        "tied": _TIED,
        "biases": _UNTIED | _USE_BIAS,
        "rope": _UNTIED | {"rope_parameters": ROPES["yarn"], "num_key_value_heads": 1},
        "hidden heads": _TIED | {"head_dim": 12, "num_key_value_heads": 4},
    },
    "Ernie4_5_Moe": {
        "experts": _ERNIE,
        "biases, tied": _ERNIE | _TIED | _USE_BIAS | {"moe_num_shared_experts": 1},
        "some layers": _ERNIE
        | {"moe_layer_interval": 2, "moe_layer_start_index": 0, "moe_k": 1},
        "first layers": _ERNIE
        | {
            "moe_layer_start_index": 0,
            "moe_layer_end_index": 1,
            "moe_num_shared_experts": 0,
            "moe_norm_min": 0.5,
            "rope_parameters": ROPES["linear"],
        },
    },
    "MiniMaxM2": {
        "all turn": _EXPERTS,
        "half turn": _EXPERTS | {"rotary_dim": 8, "num_experts_per_tok": 3},
        "tied, a quarter turns": _EXPERTS
        | _TIED
        | {
            "num_key_value_heads": 1,
            "rope_parameters": ROPES["default"] | {"partial_rotary_factor": 0.25},
        },
        "yarn": _EXPERTS
        | {
            "head_dim": 32,
            "num_local_experts": 6,
            "num_key_value_heads": 4,
            "rope_parameters": ROPES["yarn"] | {"partial_rotary_factor": 0.5},
        },
    },
    "Dots1": {
        "experts": _ROUTED,
        "groups, windows": _ROUTED
        | _GROUPS
        | _BIAS
        | {"sliding_window": WINDOW, "max_window_layers": 1, "norm_topk_prob": True},
        "windows everywhere": _ROUTED
        | _TIED
        | {"sliding_window": WINDOW, "max_window_layers": 0, "n_shared_experts": 1},
        "windows alternate": _ROUTED
        | {
            "sliding_window": WINDOW,
            "layer_types": _MIXED,
            "first_k_dense_replace": 0,
            "rope_parameters": ROPES["yarn"],
            "head_dim": 32,
        },
    },
    "SolarOpen": {
        "experts": _ROUTED,
        "groups, biases": _ROUTED | _GROUPS | _BIAS | {"norm_topk_prob": False},
        "tied": _ROUTED | _TIED | {"n_shared_experts": 1, "num_key_value_heads": 4},
        "yarn": _ROUTED | {"rope_parameters": ROPES["yarn"], "head_dim": 32},
    },
    "Laguna": {
        "full": _LAGUNA,
        "windows, heads by layer": _LAGUNA
        | {
            "layer_types": _MIXED,
            "num_attention_heads_per_layer": [2, 4, 6],
            "moe_routed_scaling_factor": 2.5,
        },
        "gates of elements": _LAGUNA
        | _BIAS
        | {
            "gating": "per-element",
            "layer_types": _MIXED,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "moe_router_logit_softcapping": 1.5,
        },
        "ropes, tied": _LAGUNA
        | _TIED
        | {
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "num_attention_heads_per_layer": [4, 4, 2],
            "num_key_value_heads": 1,
            "rope_parameters": {
                "full_attention": _YARN
                | {"rope_theta": 5e5, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
            "shared_expert_intermediate_size": 8,
        },
    },
    "HunYuanDenseV1": {
        "plain": {},
        "alpha": {"rope_parameters": ALPHA},
        "biases, tied": _TIED | _BIAS | {"rope_scaling": _OLD_ALPHA},
        "yarn": {"rope_parameters": ROPES["yarn"], "head_dim": 32},
    },
    "HunYuanMoEV1": {
        "experts": _HUNYUAN_MOE,
        "biases, alpha": _HUNYUAN_MOE | _BIAS | {"rope_parameters": ALPHA},
        "tied, by layer": _HUNYUAN_MOE | _TIED | {"moe_topk": [1, 3, 2]},
        "one expert": {"head_dim": 32},
    },
    "GptOss": {
        "alternate": _EXPERTS | {"sliding_window": WINDOW},
        "no biases": _EXPERTS
        | {
            "attention_bias": False,
            "sliding_window": WINDOW,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    },
    "Gemma2": {
        "caps": _GEMMA | _CAPS,
        "no caps": _GEMMA
        | _BIAS
        | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        "caps of scores": _GEMMA
        | _UNTIED
        | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": None},
        "windows listed": _GEMMA
        | _CAPS
        | {
            "query_pre_attn_scalar": 9,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": ROPES["linear"],
        },
    },
    "Gemma3n": {
        "plain": _GEMMA3N,
        "shared keys": _GEMMA3N
        | _SHARED_KEYS
        | _UNTIED
        | {"altup_num_inputs": 4, "altup_active_idx": 2},
        "sparse": _GEMMA3N
        | _UNTIED
        | {
            "activation_sparsity_pattern": [0.9, 0.5, 0.0],
            "intermediate_size": [96, 64, 128],
            "final_logit_softcapping": 7.0,
        },
        "fewer inputs": _GEMMA3N
        | _BIAS
        | {
            "vocab_size_per_layer_input": 100,
            "altup_correct_scale": False,
            "altup_active_idx": 1,
            "altup_num_inputs": 2,
        },
        "all": _GEMMA3N
        | _SHARED_KEYS
        | _BIAS
        | _UNTIED
        | {
            "vocab_size_per_layer_input": 120,
            "altup_active_idx": 1,
            "altup_correct_scale": False,
            "activation_sparsity_pattern": [0.8, 0.0, 0.3, 0.95, 0.0, 0.6],
            "intermediate_size": [96, 64, 128, 96, 96, 32],
            "final_logit_softcapping": 3.0,
            "laurel_rank": 4,
            "rms_norm_eps": 1e-3,
            "rope_parameters": _BY_KIND,
        },
    },
    "Gemma4": {
        "plain": _GEMMA4,
        "inputs of layers": _GEMMA4 | _LAYER_INPUTS | {"final_logit_softcapping": 3.0},
        "keys are values": _GEMMA4
        | _UNTIED
        | _BIAS
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
        "shared keys": _GEMMA4
        | _LAYER_INPUTS
        | {
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 3,
            "layer_types": _MIXED + _MIXED,
            "use_double_wide_mlp": True,
        },
        "experts": _GEMMA4 | _GEMMA4_EXPERTS,
        "all": _GEMMA4
        | _GEMMA4_EXPERTS
        | _LAYER_INPUTS
        | _BIAS
        | _UNTIED
        | {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 3,
            "layer_types": _MIXED + _MIXED,
            "use_double_wide_mlp": True,
            "top_k_experts": 1,
            "final_logit_softcapping": 3.0,
        },
        "small full heads": _GEMMA4
        | {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "global_head_dim": 8,
            "num_hidden_layers": 6,
            "layer_types": [*_MIXED, "full_attention", *_MIXED[1:]],
            "rope_parameters": _BY_KIND,
        },
    },
    "Gemma3": {
        "logits capped": _GEMMA | {"final_logit_softcapping": 3.0},
        "pattern": _GEMMA | {"sliding_window_pattern": 2},
        "ropes": _GEMMA
        | _BIAS
        | {"rope_parameters": _BY_KIND, "tie_word_embeddings": False},
    },
    "Granite": {
        "plain": {"initializer_range": 0.2},
        "multipliers": _MULTIPLIERS,
        "biases": _BIAS | _TIED | {"mlp_bias": True, "attention_multiplier": 0.2},
        "small residuals": _BIAS
        | {"residual_multiplier": 0.22, "embedding_multiplier": 12.0, "head_dim": 32},
    },
    "Olmo2": {
        "norms behind": {},
        "biases": _BIAS | _TIED,
        "head_dim 32": {"head_dim": 32, "rms_norm_eps": 1e-3},
        "one key head": {"num_key_value_heads": 1, "rope_parameters": ROPES["linear"]},
        "all key heads": {"num_key_value_heads": 4, "rope_parameters": _YARN},
    },
    "Olmo3": {
        "windows alternate": {"sliding_window": WINDOW, "layer_types": _MIXED},
        "windows": _BIAS | {"sliding_window": WINDOW},
        "ropes": _TIED | {"sliding_window": WINDOW, "rope_parameters": _BY_KIND},
        "yarn": {
            "sliding_window": WINDOW,
            "layer_types": _MIXED,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-3,
            "rope_parameters": {
                "full_attention": _YARN | {"attention_factor": 1.2, "rope_theta": 2e5}
            },
        },
    },
    "Olmoe": {
        "experts": _OLMOE,
        "biases, normalised": _OLMOE | _BIAS | _TIED | {"norm_topk_prob": True},
        "one key head": _OLMOE
        | {"num_key_value_heads": 1, "rope_parameters": ROPES["linear"]},
        "all key heads": _OLMOE
        | {
            "num_key_value_heads": 4,
            "num_experts_per_tok": 1,
            "rms_norm_eps": 1e-3,
            "rope_parameters": _YARN,
        },
        "all": _OLMOE
        | _BIAS
        | _TIED
        | {
            "head_dim": ...,
            "num_experts": 7,
            "norm_topk_prob": True,
            "rms_norm_eps": 1e-2,
            "rope_parameters": ROPES["llama3"],
        },
    },
    "Phi3": {
        "fused": _PHI,
        "partial": _PHI
        | _TIED
        | {
            "head_dim": 32,
            "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75},
            "rms_norm_eps": 1e-3,
        },
        "window": _PHI | {"sliding_window": WINDOW, "num_key_value_heads": 4},
        "longrope": _PHI | {"rope_parameters": _LONGROPE},
        "longrope, partial": _PHI
        | {
            "num_key_value_heads": 1,
            "rope_parameters": _LONGROPE
            | {
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0, 1.1, 1.2, 1.5],
                "long_factor": [1.0, 2.0, 4.0, 7.0],
                "attention_factor": 1.3,
                "factor": 4.0,
            },
        },
    },
    "Glm": _GLM,
    "Glm4": _GLM | {"more eps": _UNPADDED | {"rms_norm_eps": 1e-2}},
    "SeedOss": {
        "plain": _UNPADDED,
        "no biases": _UNPADDED | _TIED | {"attention_bias": False},
        "biases": _UNPADDED | {"attention_out_bias": True, "mlp_bias": True},
        "out bias": _UNPADDED
        | {
            "attention_bias": False,
            "attention_out_bias": True,
            "head_dim": 32,
            "rms_norm_eps": 1e-3,
            "rope_parameters": ROPES["llama3"],
        },
    },
    "GraniteMoe": _GRANITE_MOE,
    "GraniteMoeShared": {
        name: row | {"shared_intermediate_size": width}
        for (name, row), width in zip(_GRANITE_MOE.items(), (0, 40, 24, 96), strict=True)
    },
    "Cohere": {
        "plain": {},
        "norms of heads": {
            "use_qk_norm": True,
            "logit_scale": 0.25,
            "num_key_value_heads": 4,
        },
        "biases, untied": _BIAS | _UNTIED | {"use_qk_norm": True, "logit_scale": 2.0},
        "llama3": {"rope_parameters": ROPES["llama3"], "layer_norm_eps": 1e-2},
    },
    "Cohere2": {
        "windows alternate": _COHERE | {"layer_types": _MIXED},
        "pattern": _COHERE | {"sliding_window_pattern": 3, "logit_scale": 0.25},
        "pattern of two": _COHERE | _BIAS | {"sliding_window_pattern": 2},
        "untied": _COHERE | _UNTIED | {"layer_norm_eps": 1e-2, "logit_scale": 2.0},
    },
    "Falcon": {
        "one key head": _FALCON,
        "all key heads": _FALCON | {"multi_query": False, "bias": True},
        "sequential": _FALCON
        | {"parallel_attn": False, "bias": True, "ffn_hidden_size": 128},
        "two norms": _FALCON_40B | {"bias": True, "layer_norm_epsilon": 1e-2},
        "one norm": _FALCON_40B | _UNTIED | {"num_ln_in_parallel_attn": 1},
        "all": _FALCON_40B
        | {
            "num_ln_in_parallel_attn": 2,
            "bias": True,
            "ffn_hidden_size": 128,
            "rope_parameters": ROPES["linear"],
        },
    },
    "Phi": {
        "plain": {},
        "all rotated": _TIED | {"partial_rotary_factor": 1.0, "layer_norm_eps": 1e-2},
        "one key head": {"num_key_value_heads": 1, "head_dim": 32},
        "yarn": {
            "hidden_act": "gelu_pytorch_tanh",
            "rope_parameters": _YARN | {"partial_rotary_factor": 0.25},
        },
    },
    "Starcoder2": {
        "plain": {},
        "window": {"sliding_window": WINDOW, "norm_epsilon": 1e-2},
        "no biases": _UNTIED | {"use_bias": False, "head_dim": 32},
        "gelu_new": {"hidden_act": "gelu_new", "rope_parameters": ROPES["yarn"]},
    },
    "StableLm": {
        "plain": {},
        "parallel": {"use_parallel_residual": True, "use_qkv_bias": True},
        "norms of heads": {"qk_layernorm": True, "partial_rotary_factor": 0.5},
        "all": _TIED
        | {
            "use_parallel_residual": True,
            "qk_layernorm": True,
            "use_qkv_bias": True,
            "layer_norm_eps": 1e-2,
            "rope_parameters": ROPES["linear"] | {"partial_rotary_factor": 1.0},
        },
    },
    "SmolLM3": {
        "every fourth": {"num_hidden_layers": 4, "pad_token_id": None},
        "listed": _UNPADDED | {"no_rope_layers": [0, 1, 1, 0]},
        "interval": _UNPADDED | _BIAS | {"no_rope_layer_interval": 2, "mlp_bias": True},
        "windows": _UNPADDED
        | _UNTIED
        | {
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
        },
        "windows alternate": _UNPADDED
        | {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": _MIXED,
            "no_rope_layers": [1, 0, 0],
        },
    },
}
# Families whose factors of norms are less 1, but for those of these names.
OFFSET_NORMS: Final = ("Gemma2", "Gemma3", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe")
OWN_NORMS: Final = ("linear_attn.norm.weight",)
# transformers' own classes over minfer's paged attention
OUTSIDE: Final[Mapping[str, dict[str, dict[str, Any]]]] = {
    "GPTNeoX": {
        "parallel residual": _NEOX,
        "sequential": _NEOX | {"use_parallel_residual": False},
    },
    # A rope that its row of the table does not have.
    "Olmo2": {"dynamic rope": {"rope_parameters": _DYNAMIC}},
    "Nemotron": {"plain": {"hidden_act": "relu2"}},
    "Exaone4": {"windows alternate": {"sliding_window": WINDOW, "layer_types": _MIXED}},
}
VARIANTS, OTHERS = (
    {
        # Copies, as transformers' classes write to the objects in them.
        (family, name): deepcopy({k: v for k, v in (SIZES | row).items() if v is not ...})
        for family, rows in table.items()
        for name, row in rows.items()
    }
    for table in (FAMILIES, OUTSIDE)
)


def save(folder: str, family: str, config: Mapping[str, Any]) -> Any:
    """Write a random checkpoint; returns transformers' model of it."""
    torch.manual_seed(0)
    config_of_family = class_of(family)(**deepcopy(config))
    model = getattr(transformers, f"{family}ForCausalLM")(config_of_family).eval()
    randomise(model, norms_near_one=family not in OFFSET_NORMS)
    model.save_pretrained(folder)
    return model


def greedy_tokens(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """The next `count` tokens by transformers' `generate`, without an end of sequence."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
        )
    tokens: list[int] = generated[0, len(prompt) :].tolist()
    return tokens


def randomise(model: Any, *, norms_near_one: bool) -> None:
    """Change what is made as zeros and ones, which would hide mistakes."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        factors = (
            "layer_scalar",
            "router.scale",
            "per_expert_scale",
            "correct_output_scale",
            ".D",
        )
        is_factor = name.endswith((*factors, *OWN_NORMS))
        near_one = (norms_near_one and "norm" in name) or is_factor
        if near_one or any(kind in name for kind in ("bias", "norm", "sinks")):
            torch.nn.init.normal_(tensor, float(near_one), 0.3)


def class_of(family: str) -> Any:
    """The config class of a family."""
    with_text = ("Gemma3", "Gemma3n", "Gemma4", "Llama4", "Qwen3_5", "Qwen3_5Moe")
    name = f"{family}Text" if family in with_text else family
    return getattr(transformers, f"{name}Config")


def written(family: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json that transformers writes of a config."""
    config_written: dict[str, Any] = class_of(family)(**deepcopy(config)).to_dict()
    return config_written | {"architectures": [f"{family}ForCausalLM"]}


def config_of(family: str = "Llama", **changes: Any) -> dict[str, Any]:
    """A config as transformers writes it, with `changes`; ... removes a key."""
    config_made = written(family, SIZES) | changes
    return {key: value for key, value in config_made.items() if value is not ...}

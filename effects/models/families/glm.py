"""Rows of the family table: GLM, of Z.ai."""

from typing import Final

from attrs import evolve

from minfer.effects.models.families.attention_keys import Biases, Positions, QkNorm
from minfer.effects.models.families.common import BIAS, MLA, SIGMOID
from minfer.effects.models.families.family import Family
from minfer.effects.models.families.layer_keys import NormNames, Norms, StoredNames
from minfer.effects.models.families.mtp_keys import GLM_MTP

_GLM: Final = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-7,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}
_ENDS: Final = (151329, 151336, 151338)
ROWS: Final = (
    Family(  # GLM-4-9B
        "GlmForCausalLM",
        "glm",
        _GLM,
        biases=Biases(qkv=BIAS),
        positions=Positions(partial=True, interleaved=True),
        stored=StoredNames(gate_up="gate_up_proj"),
        eos_ids=_ENDS,
    ),
    Family(  # GLM-4-0414 and GLM-Z1
        "Glm4ForCausalLM",
        "glm4",
        _GLM,
        biases=Biases(qkv=BIAS),
        norms=Norms(
            names=NormNames(
                after_attention="post_self_attn_layernorm",
                after_feed="post_mlp_layernorm",
            )
        ),
        positions=Positions(partial=True, interleaved=True),
        stored=StoredNames(gate_up="gate_up_proj"),
        eos_ids=_ENDS,
    ),
    Family(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
        biases=Biases(qkv=BIAS),
        qk_norm=QkNorm(present="use_qk_norm"),
        positions=Positions(partial=True),
        experts=SIGMOID,
        mtp=GLM_MTP,
    ),
    Family(  # GLM-4.7-Flash
        "Glm4MoeLiteForCausalLM",
        "glm4_moe_lite",
        MLA
        | {
            "max_position_embeddings": 202752,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 1,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "moe_intermediate_size": 1536,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
            "n_routed_experts": 64,
            "routed_scaling_factor": 1.8,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
        biases=Biases(qkv=BIAS, out=BIAS),
        attention="mla",
        experts=evolve(
            SIGMOID, sparse=evolve(SIGMOID.sparse, layer_types="mlp_layer_types")
        ),
        mtp=GLM_MTP,
    ),
)

"""Rows of the family table: DeepSeek V2 and V3, and Youtu, which is of the same form."""

from typing import Final

from minfer.effects.models.families.attention_keys import Biases
from minfer.effects.models.families.common import BIAS, MLA, SIGMOID
from minfer.effects.models.families.expert_keys import (
    ExpertKeys,
    Routing,
    SharedExperts,
    SparseLayers,
)
from minfer.effects.models.families.family import Family, Variant
from minfer.effects.models.families.mtp_keys import DEEPSEEK_MTP

_DEEPSEEK: Final = ExpertKeys(
    count=("num_experts", "n_routed_experts"),
    shared=SharedExperts(count="n_shared_experts"),
    sparse=SparseLayers(first_dense="first_k_dense_replace"),
    routing=Routing(
        normalise=False, groups=True, scaling="routed_scaling_factor", float32=True
    ),
)
ROWS: Final = (
    Family(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        MLA
        | {
            "max_position_embeddings": 2048,
            "eos_token_id": 2,
            "q_lora_rank": 1536,
            "moe_intermediate_size": 1407,
            "n_shared_experts": 2,
            "n_routed_experts": 64,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 0,
            "topk_method": "greedy",
        },
        biases=Biases(qkv=BIAS, out=BIAS, mlp="mlp_bias"),
        attention="mla",
        experts=_DEEPSEEK,
        # transformers' class does not read them.
        variants=(Variant(when={}, config={"rope_interleave": True, "head_dim": None}),),
    ),
    Family(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        MLA
        | {
            "max_position_embeddings": 4096,
            "eos_token_id": 1,
            "q_lora_rank": 1536,
            "moe_intermediate_size": 2048,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_routed_experts": 256,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 3,
            "norm_topk_prob": True,
        },
        biases=Biases(qkv=BIAS, out=BIAS),
        attention="mla",
        experts=SIGMOID,
        mtp=DEEPSEEK_MTP,
    ),
    Family(
        "YoutuForCausalLM",
        "youtu",
        MLA
        | {
            "max_position_embeddings": 131072,
            "eos_token_id": 128001,
            "q_lora_rank": 1536,
            "tie_word_embeddings": True,
        },
        biases=Biases(qkv=BIAS, out=BIAS),
        attention="mla",
    ),
)

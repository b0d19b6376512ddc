"""Rows of the family table: Mistral, Ministral and Mixtral, of Mistral AI."""

from typing import Final

from minfer.effects.models.families.attention_keys import Biases, Positions, Windows
from minfer.effects.models.families.common import (
    BIAS,
    LLAMA,
    MIXTRAL_EXPERTS,
    MIXTRAL_NAMES,
)
from minfer.effects.models.families.expert_keys import (
    ExpertKeys,
    Routing,
    SharedExperts,
    SparseLayers,
    StoredExperts,
)
from minfer.effects.models.families.family import Family

_LONG: Final = {"max_position_embeddings": 131072, "num_key_value_heads": 8}
_MISTRAL: Final = LLAMA | _LONG | {"sliding_window": 4096}
_YARN: Final = {
    "type": "yarn",
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
ROWS: Final = (
    Family("MistralForCausalLM", "mistral", _MISTRAL, windows=Windows(where="every")),
    # Ministral 8B is published as `mistral` with `layer_types`.
    Family("MinistralForCausalLM", "ministral", _MISTRAL, windows=Windows(where="every")),
    Family(
        "MixtralForCausalLM",
        "mixtral",
        {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 2,
            "rope_theta": 1e6,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
        },
        windows=Windows(where="uniform"),
        experts=MIXTRAL_EXPERTS,
        stored=MIXTRAL_NAMES,
    ),
    Family(
        "Ministral3ForCausalLM",
        "ministral3",
        {
            "max_position_embeddings": 262144,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 2,
            "rope_parameters": _YARN
            | {
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
            },
        },
        windows=Windows(where="uniform"),
        positions=Positions(query_scale="rope"),
    ),
    Family(
        "Mistral4ForCausalLM",
        "mistral4",
        {
            "max_position_embeddings": 1048576,
            "eos_token_id": 2,
            "rope_interleave": True,
            "kv_lora_rank": 256,
            "q_lora_rank": 1024,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "moe_intermediate_size": 2048,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "norm_topk_prob": True,
            "rope_parameters": _YARN
            | {
                "rope_theta": 10000.0,
                "factor": 128.0,
                "original_max_position_embeddings": 8192,
            },
        },
        biases=Biases(qkv=BIAS, out=BIAS),
        attention="mla",
        positions=Positions(partial=True, query_scale="rope"),
        experts=ExpertKeys(
            count=("num_local_experts", "n_routed_experts"),
            shared=SharedExperts(count="n_shared_experts"),
            sparse=SparseLayers(first_dense="first_k_dense_replace"),
            stored=StoredExperts(stacked=True),
            routing=Routing(best_two=True, groups=True, scaling="routed_scaling_factor"),
        ),
    ),
)

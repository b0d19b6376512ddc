"""Rows of the family table: Ernie 4.5, of Baidu."""

from typing import Final

from minfer.effects.models.families.attention_keys import Biases, Positions
from minfer.effects.models.families.expert_keys import (
    ExpertKeys,
    Routing,
    SharedExperts,
    SparseLayers,
)
from minfer.effects.models.families.family import Family
from minfer.effects.models.families.layer_keys import StoredNames
from minfer.effects.models.families.mtp_keys import ERNIE_MTP

_BIAS: Final = "use_bias"
_ERNIE: Final = {
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
ROWS: Final = (
    Family(
        "Ernie4_5ForCausalLM",
        "ernie4_5",
        _ERNIE | {"num_key_value_heads": 2, "head_dim": 128},
        biases=Biases(qkv=_BIAS, out=_BIAS, mlp=_BIAS),
        positions=Positions(interleaved=True),
        class_aliases=("Ernie4_5_ForCausalLM",),
    ),
    Family(
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        _ERNIE
        | {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 1536,
            "moe_k": 6,
            "moe_num_experts": 64,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
            "moe_norm_min": 1e-12,
        },
        biases=Biases(qkv=_BIAS, out=_BIAS, mlp=_BIAS, lm_head=_BIAS),
        positions=Positions(interleaved=True),
        experts=ExpertKeys(
            count=("num_experts", "moe_num_experts"),
            routing=Routing(
                top_k=("num_experts_per_tok", "moe_k"),
                normalise=True,
                correction="mlp.moe_statics.e_score_correction_bias",
                correction_rows=True,
                min_sum="moe_norm_min",
                float32=True,
            ),
            shared=SharedExperts(count="moe_num_shared_experts"),
            sparse=SparseLayers(between=True),
        ),
        stored=StoredNames(skipped=("model.mtp_",)),
        mtp=ERNIE_MTP,
    ),
)

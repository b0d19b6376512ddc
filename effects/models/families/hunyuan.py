"""Rows of the family table: Hunyuan, of Tencent."""

from typing import Final

from minfer.effects.models.families.attention_keys import Biases, Positions, QkNorm
from minfer.effects.models.families.common import BIAS
from minfer.effects.models.families.expert_keys import (
    ExpertKeys,
    Routing,
    SharedExperts,
    StoredExperts,
)
from minfer.effects.models.families.family import Family

_HUNYUAN: Final = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
_NORM_NAMES: Final = ("self_attn.query_layernorm", "self_attn.key_layernorm")
ROWS: Final = (
    Family(
        "HunYuanDenseV1ForCausalLM",
        "hunyuan_v1_dense",
        _HUNYUAN,
        biases=Biases(qkv=BIAS, out=BIAS),
        qk_norm=QkNorm(present=True, after_rope=True, names=_NORM_NAMES),
        positions=Positions(ntk_alpha=True),
    ),
    Family(
        "HunYuanMoEV1ForCausalLM",
        "hunyuan_v1_moe",
        _HUNYUAN | {"num_experts": 1, "moe_topk": 1},
        biases=Biases(qkv=BIAS, out=BIAS),
        qk_norm=QkNorm(present=True, after_rope=True, names=_NORM_NAMES),
        positions=Positions(ntk_alpha=True),
        experts=ExpertKeys(
            count=("num_local_experts", "num_experts"),
            inter="intermediate_size",
            routing=Routing(
                top_k=("num_experts_per_tok", "moe_topk"),
                top_k_by_layer=True,
                normalise=True,
                float32=True,
            ),
            shared=SharedExperts(width="intermediate_size", name="mlp.shared_mlp"),
            stored=StoredExperts(router="mlp.gate.wg"),
        ),
    ),
)

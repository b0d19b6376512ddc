"""Rows of the family table: Hunyuan, of Tencent."""

from typing import Final

from minfer.effects.models.families.common import BIAS
from minfer.effects.models.families.family import ExpertKeys, Family

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
        qkv_bias=BIAS,
        out_bias=BIAS,
        qk_norm=True,
        qk_norm_after_rope=True,
        qk_norm_names=_NORM_NAMES,
        ntk_alpha=True,
    ),
    Family(
        "HunYuanMoEV1ForCausalLM",
        "hunyuan_v1_moe",
        _HUNYUAN | {"num_experts": 1, "moe_topk": 1},
        qkv_bias=BIAS,
        out_bias=BIAS,
        qk_norm=True,
        qk_norm_after_rope=True,
        qk_norm_names=_NORM_NAMES,
        ntk_alpha=True,
        experts=ExpertKeys(
            count=("num_local_experts", "num_experts"),
            inter="intermediate_size",
            top_k=("num_experts_per_tok", "moe_topk"),
            top_k_by_layer=True,
            normalise=True,
            scaling="",
            float32=True,
            shared="intermediate_size",
            router="mlp.gate.wg",
            shared_experts="mlp.shared_mlp",
        ),
    ),
)

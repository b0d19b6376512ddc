"""Rows of the family table: Laguna, of poolside."""

from typing import Final

from minfer.effects.models.families.common import BIAS
from minfer.effects.models.families.family import (
    ExpertKeys,
    Family,
    HeadGateKeys,
    RopeBases,
)

_ROPES: Final = {
    "full_attention": {"rope_theta": 5e5, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": 1.0},
}
ROWS: Final = (
    Family(
        "LagunaForCausalLM",
        "laguna",
        {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "sliding_window": 512,
            "gating": True,
            "rope_parameters": _ROPES,
            "mlp_only_layers": [0],
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts_per_tok": 8,
            "num_experts": 256,
            "moe_routed_scaling_factor": 1.0,
        },
        "listed",
        BIAS,
        BIAS,
        heads_by_layer="num_attention_heads_per_layer",
        head_gate=HeadGateKeys("self_attn.g_proj", "softplus", "gating"),
        qk_norm=True,
        rope_bases=RopeBases(full=5e5, sliding=1e4, own_shares=True),
        partial_rotary=True,
        experts=ExpertKeys(
            count=("num_experts",),
            scores="sigmoid",
            normalise=True,
            correction="mlp.experts.e_score_correction_bias",
            scaling="moe_routed_scaling_factor",
            logit_cap="moe_router_logit_softcapping",
            shared="shared_expert_intermediate_size",
            layer_types="mlp_layer_types",
            shared_experts="mlp.shared_expert",
        ),
    ),
)

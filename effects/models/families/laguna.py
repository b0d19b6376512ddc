"""Rows of the family table: Laguna, of poolside."""

from typing import Final

from minfer.effects.models.families.attention_keys import (
    Biases,
    HeadGateKeys,
    HeadKeys,
    Positions,
    QkNorm,
    RopeBases,
    Windows,
)
from minfer.effects.models.families.common import BIAS
from minfer.effects.models.families.expert_keys import (
    ExpertKeys,
    Routing,
    SharedExperts,
    SparseLayers,
)
from minfer.effects.models.families.family import Family
from minfer.effects.models.families.layer_keys import StoredNames
from minfer.effects.models.parts import Renaming

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
        windows=Windows(where="listed"),
        biases=Biases(qkv=BIAS, out=BIAS),
        heads=HeadKeys(
            by_layer="num_attention_heads_per_layer",
            gate=HeadGateKeys(
                name="self_attn.g_proj", activation="softplus", granularity="gating"
            ),
        ),
        qk_norm=QkNorm(present=True),
        positions=Positions(
            bases=RopeBases(full=5e5, sliding=1e4, own_shares=True), partial=True
        ),
        experts=ExpertKeys(
            count=("num_experts",),
            routing=Routing(
                scores="sigmoid",
                normalise=True,
                correction="mlp.experts.e_score_correction_bias",
                scaling="moe_routed_scaling_factor",
                logit_cap="moe_router_logit_softcapping",
            ),
            shared=SharedExperts(
                width="shared_expert_intermediate_size", name="mlp.shared_expert"
            ),
            sparse=SparseLayers(dense="mlp_only_layers", layer_types="mlp_layer_types"),
        ),
        stored=StoredNames(  # of transformers 5, in adapters
            renamings=(Renaming(r"\.shared_experts\.", ".shared_expert."),)
        ),
    ),
)

"""Rows of the family table: Jamba, of AI21 Labs."""

from typing import Final

from minfer.effects.models.families.attention_keys import Positions
from minfer.effects.models.families.expert_keys import (
    ExpertKeys,
    Routing,
    SparseLayers,
    StoredExperts,
)
from minfer.effects.models.families.family import Family, Variant
from minfer.effects.models.families.layer_keys import NormNames, Norms, StoredNames
from minfer.effects.models.families.recurrent_keys import HybridLayers, MambaKeys
from minfer.effects.models.parts import Renaming

_EXPERTS: Final = ExpertKeys(
    count=("num_local_experts", "num_experts"),
    inter="intermediate_size",
    routing=Routing(normalise=False),
    sparse=SparseLayers(period="expert_layer_period", offset="expert_layer_offset"),
    stored=StoredExperts(router="feed_forward.router", experts="feed_forward.experts"),
)
ROWS: Final = (
    Family(
        "JambaForCausalLM",
        "jamba",
        {
            "max_position_embeddings": 262144,
            "num_key_value_heads": 8,
            "eos_token_id": 2,
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": "auto",
            "mamba_conv_bias": True,
        },
        hybrid=HybridLayers(
            listed=(), period="attn_layer_period", offset="attn_layer_offset"
        ),
        recurrent=MambaKeys(),
        experts=_EXPERTS,
        positions=Positions(rotated_layers="none"),
        norms=Norms(names=NormNames(before_feed="pre_ff_layernorm")),
        stored=StoredNames(
            feed_forward="feed_forward",
            renamings=(Renaming(r"\.final_layernorm\.", ".norm."),),
        ),
        # One expert is a dense feed-forward.
        variants=(
            Variant(when={"num_experts": 1}, row={"experts": None}),
            Variant(when={"num_local_experts": 1}, row={"experts": None}),
        ),
    ),
)

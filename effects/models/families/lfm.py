"""Rows of the family table: LFM2, of Liquid AI."""

from typing import Final

from attrs import evolve

from minfer.effects.models.families.attention_keys import QkNorm
from minfer.effects.models.families.expert_keys import (
    ExpertKeys,
    Routing,
    SparseLayers,
    StoredExperts,
)
from minfer.effects.models.families.family import Family, Variant
from minfer.effects.models.families.layer_keys import (
    FeedForward,
    NormNames,
    Norms,
    StoredNames,
)
from minfer.effects.models.families.recurrent_keys import HybridLayers, ShortConvKeys
from minfer.effects.models.parts import Renaming

_DEFAULTS: Final = {
    "max_position_embeddings": 128000,
    "num_key_value_heads": 8,
    "norm_eps": 1e-5,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "conv_L_cache": 3,
}
_LFM2: Final = Family(
    "Lfm2ForCausalLM",
    "lfm2",
    _DEFAULTS
    | {
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
    },
    hybrid=HybridLayers(
        names={"full_attention": "attention", "conv": "recurrent"},
        attention="full_attn_idxs",
    ),
    recurrent=ShortConvKeys(),
    qk_norm=QkNorm(
        present=True, names=("self_attn.q_layernorm", "self_attn.k_layernorm")
    ),
    norms=Norms(
        names=NormNames(before_attention="operator_norm", before_feed="ffn_norm")
    ),
    feed_forward=FeedForward(
        first_width="block_ff_dim", adjusted="block_auto_adjust_ff_dim"
    ),
    stored=StoredNames(
        feed_forward="feed_forward",
        renamings=(
            Renaming(r"\.embedding_norm\.", ".norm."),
            Renaming(r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
            Renaming(r"\.feed_forward\.w1\.", ".feed_forward.gate_proj."),
            Renaming(r"\.feed_forward\.w3\.", ".feed_forward.up_proj."),
            Renaming(r"\.feed_forward\.w2\.", ".feed_forward.down_proj."),
        ),
    ),
    aliases={"norm_eps": "rms_norm_eps"},
    variants=tuple(
        Variant(when={"tie_embedding": tied}, config={"tie_word_embeddings": tied})
        for tied in (False, True)
    ),
)
_EXPERTS: Final = ExpertKeys(
    count=("num_experts",),
    routing=Routing(
        scores="sigmoid",
        correction="feed_forward.expert_bias",
        scaling="routed_scaling_factor",
        added=1e-6,
    ),
    sparse=SparseLayers(first_dense="num_dense_layers"),
    stored=StoredExperts(
        router="feed_forward.gate",
        experts="feed_forward.experts",
        matrices=("w1", "w3", "w2"),
    ),
)
ROWS: Final = (
    _LFM2,
    evolve(
        _LFM2,
        architecture="Lfm2MoeForCausalLM",
        model_type="lfm2_moe",
        defaults=_DEFAULTS
        | {
            "moe_intermediate_size": 1792,
            "num_dense_layers": 2,
            "num_experts_per_tok": 4,
            "num_experts": 32,
            "norm_topk_prob": True,
        },
        hybrid=HybridLayers(names={"full_attention": "attention", "conv": "recurrent"}),
        feed_forward=FeedForward(),
        experts=_EXPERTS,
        variants=(
            *_LFM2.variants,
            Variant(
                when={"use_expert_bias": False},
                row={
                    "experts": evolve(
                        _EXPERTS, routing=evolve(_EXPERTS.routing, correction="")
                    )
                },
            ),
        ),
    ),
)

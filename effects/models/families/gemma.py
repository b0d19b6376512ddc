"""Rows of the family table: Gemma, of Google."""

from typing import Final

from minfer.effects.models.families.attention_keys import (
    Biases,
    FullHeads,
    HeadKeys,
    Positions,
    QkNorm,
    RopeBases,
    Scores,
    Windows,
)
from minfer.effects.models.families.common import BIAS
from minfer.effects.models.families.expert_keys import (
    ExpertKeys,
    NormsBeside,
    Routing,
    SparseLayers,
    StoredExperts,
)
from minfer.effects.models.families.family import Family
from minfer.effects.models.families.layer_keys import (
    Factors,
    LayerExtras,
    NormNames,
    Norms,
)

_NORMS: Final = NormNames(
    after_attention="post_attention_layernorm",
    before_feed="pre_feedforward_layernorm",
    after_feed="post_feedforward_layernorm",
)
_GEMMA4_ROPES: Final = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e6,
    },
}
ROWS: Final = (
    Family(
        "Gemma2ForCausalLM",
        "gemma2",
        {
            "vocab_size": 256000,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 8192,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": True,
            "eos_token_id": 1,
        },
        windows=Windows(where="pattern"),
        biases=Biases(qkv=BIAS, out=BIAS),
        activation="gelu_tanh",
        scores=Scores(cap="attn_logit_softcapping", root_of="query_pre_attn_scalar"),
        factors=Factors(logit_cap="final_logit_softcapping", embedding_root=True),
        norms=Norms(offset=True, names=_NORMS),
    ),
    Family(
        "Gemma4ForCausalLM",
        "gemma4_text",
        {
            "vocab_size": 262144,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 30,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "global_head_dim": 512,
            "max_position_embeddings": 131072,
            "rope_parameters": _GEMMA4_ROPES,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "vocab_size_per_layer_input": 262144,
            "hidden_size_per_layer_input": 256,
            "tie_word_embeddings": True,
            "eos_token_id": 1,
        },
        windows=Windows(where="pattern", last_full=True),
        biases=Biases(qkv=BIAS, out=BIAS),
        qk_norm=QkNorm(present=True),
        activation="gelu_tanh",
        experts=ExpertKeys(
            count=("num_experts",),
            routing=Routing(normalise=True, top_k=("top_k_experts",)),
            sparse=SparseLayers(enabled="enable_moe_block"),
            stored=StoredExperts(router="router.proj", experts="experts", stacked=True),
            beside=NormsBeside(
                experts="pre_feedforward_layernorm_2",
                dense_result="post_feedforward_layernorm_1",
                experts_result="post_feedforward_layernorm_2",
            ),
        ),
        factors=Factors(logit_cap="final_logit_softcapping", embedding_root=True),
        heads=HeadKeys(
            full=FullHeads(
                head_dim="global_head_dim",
                kv_heads="num_global_key_value_heads",
                keys_are_values="attention_k_eq_v",
            ),
            value_norm=True,
        ),
        extras=LayerExtras(
            shared_keys="num_kv_shared_layers",
            shared_wide="use_double_wide_mlp",
            inputs="hidden_size_per_layer_input",
            scalars=True,
        ),
        scores=Scores(scaled=False),
        norms=Norms(float32=True, names=_NORMS),
        positions=Positions(bases=RopeBases(full=1e6, sliding=1e4)),
    ),
    Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        {
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "tie_word_embeddings": True,
            "eos_token_id": 1,
        },
        windows=Windows(where="pattern"),
        biases=Biases(qkv=BIAS, out=BIAS),
        qk_norm=QkNorm(present=True),
        activation="gelu_tanh",
        factors=Factors(logit_cap="final_logit_softcapping", embedding_root=True),
        norms=Norms(offset=True, names=_NORMS),
        scores=Scores(root_of="query_pre_attn_scalar"),
        positions=Positions(
            bases=RopeBases(full=1e6, sliding=1e4, sliding_key="rope_local_base_freq")
        ),
    ),
)

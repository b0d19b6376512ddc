"""Rows of the family table: Gemma, of Google."""

from typing import Final

from minfer.effects.models.families.common import BIAS
from minfer.effects.models.families.family import Family, NormNames, RopeBases

_NORMS: Final = NormNames(
    after_attention="post_attention_layernorm",
    before_feed="pre_feedforward_layernorm",
    after_feed="post_feedforward_layernorm",
)
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
        "pattern",
        BIAS,
        BIAS,
        activation="gelu_tanh",
        score_cap="attn_logit_softcapping",
        logit_cap="final_logit_softcapping",
        norm_offset=True,
        norm_names=_NORMS,
        embedding_scale=True,
        score_scale="query_pre_attn_scalar",
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
        "pattern",
        BIAS,
        BIAS,
        qk_norm=True,
        activation="gelu_tanh",
        logit_cap="final_logit_softcapping",
        norm_offset=True,
        norm_names=_NORMS,
        embedding_scale=True,
        score_scale="query_pre_attn_scalar",
        rope_bases=RopeBases(full=1e6, sliding=1e4, sliding_key="rope_local_base_freq"),
        prefixes=("language_model.",),
    ),
)

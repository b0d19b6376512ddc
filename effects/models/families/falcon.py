"""Rows of the family table: Falcon and Falcon-H1, of the Technology Innovation Institute.
Falcon 3 is of Llama's form.
"""

from typing import Final

from minfer.effects.models.families.attention_keys import Biases
from minfer.effects.models.families.common import BIAS
from minfer.effects.models.families.family import Family, Variant
from minfer.effects.models.families.layer_keys import (
    Factors,
    FeedForward,
    LayerExtras,
    Multipliers,
    NormNames,
    Norms,
    StoredNames,
)
from minfer.effects.models.families.recurrent_keys import HybridLayers, Mamba2Keys
from minfer.effects.models.parts import Renaming

_PARALLEL: Final = {"extras": LayerExtras(parallel=True)}
_ONE_NORM: Final = {
    **_PARALLEL,
    "norms": Norms(layer_norm=True, bias=True, names=NormNames(before_feed="")),
}
_RENAMINGS: Final = {
    r"^transformer\.h\.": "model.layers.",
    r"^transformer\.word_embeddings\.": "model.embed_tokens.",
    r"^transformer\.ln_f\.": "model.norm.",
    r"\.ln_attn\.": ".input_layernorm.",
    r"\.ln_mlp\.": ".post_attention_layernorm.",
    r"\.self_attention\.dense\.": ".self_attn.o_proj.",
    r"\.self_attention\.": ".self_attn.",
    r"\.dense_h_to_4h\.": ".up_proj.",
    r"\.dense_4h_to_h\.": ".down_proj.",
}
_H1: Final = Family(
    "FalconH1ForCausalLM",
    "falcon_h1",
    {
        "max_position_embeddings": 8192,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 2,
        "mamba_d_ssm": 1024,
        "mamba_n_heads": 128,
        "mamba_d_head": "auto",
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "mamba_norm_before_gate": True,
    },
    hybrid=HybridLayers(listed=(), every="both"),
    recurrent=Mamba2Keys(
        inner="mamba_d_ssm",
        out_bias="projectors_bias",
        out_norm="mamba_rms_norm",
        norm_first="mamba_norm_before_gate",
    ),
    biases=Biases(qkv=BIAS, out=BIAS, mlp="mlp_bias"),
    norms=Norms(names=NormNames(before_feed="pre_ff_layernorm")),
    factors=Factors(embedding="embedding_multiplier", logits="lm_head_multiplier"),
    multipliers=Multipliers(
        keys="key_multiplier",
        attention_input="attention_in_multiplier",
        attention_result="attention_out_multiplier",
        recurrent_input="ssm_in_multiplier",
        recurrent_outputs="ssm_multipliers",
        recurrent_result="ssm_out_multiplier",
        feed_forward="mlp_multipliers",
    ),
    stored=StoredNames(
        feed_forward="feed_forward",
        renamings=(Renaming(r"\.final_layernorm\.", ".norm."),),
    ),
)
ROWS: Final = (
    Family(
        "FalconForCausalLM",
        "falcon",
        {
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "eos_token_id": 11,
            "new_decoder_architecture": False,
            "multi_query": True,
            "parallel_attn": True,
        },
        biases=Biases(qkv="bias", out="bias", mlp="bias"),
        stored=StoredNames(
            qkv="query_key_value",
            qkv_by_key_head=True,
            renamings=tuple(Renaming(*pair) for pair in _RENAMINGS.items()),
        ),
        activation="ungated_gelu",
        feed_forward=FeedForward(default_ratio=4),
        norms=Norms(layer_norm=True, bias=True),
        aliases={
            "num_kv_heads": "num_key_value_heads",
            "ffn_hidden_size": "intermediate_size",
            "layer_norm_epsilon": "rms_norm_eps",
            "activation": "hidden_act",
        },
        variants=(
            # 7B: one key head, one norm
            Variant(
                when={"new_decoder_architecture": False, "multi_query": True},
                config={"num_key_value_heads": 1},
            ),
            Variant(
                when={"new_decoder_architecture": False, "multi_query": False},
                config={"num_key_value_heads": None},
            ),
            Variant(
                when={"new_decoder_architecture": False, "parallel_attn": True},
                row=_ONE_NORM,
            ),
            # 40B and 180B: two norms
            Variant(when={"new_decoder_architecture": True}, row=_PARALLEL),
            # Falcon 2 11B: one norm
            Variant(
                when={"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
                row=_ONE_NORM,
            ),
            # What transformers cannot run, either.
            Variant(
                when={"new_decoder_architecture": True, "parallel_attn": False},
                refusal="parallel_attn False with new_decoder_architecture is not "
                "supported; True is",
            ),
            Variant(
                when={
                    "new_decoder_architecture": False,
                    "parallel_attn": True,
                    "num_ln_in_parallel_attn": 2,
                },
                refusal="num_ln_in_parallel_attn 2 without new_decoder_architecture is "
                "not supported; 1 and null are",
            ),
        ),
    ),
    _H1,
)

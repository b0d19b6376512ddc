"""Rows of the family table: Falcon, of the Technology Innovation Institute. Falcon 3 is
of Llama's form.
"""

from typing import Final

from minfer.effects.models.families.attention_keys import Biases
from minfer.effects.models.families.family import Family, Variant
from minfer.effects.models.families.layer_keys import (
    FeedForward,
    LayerExtras,
    NormNames,
    Norms,
    StoredNames,
)
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
)

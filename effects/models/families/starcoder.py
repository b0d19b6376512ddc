"""Rows of the family table: StarCoder 2, of BigCode."""

from typing import Final

from minfer.effects.models.families.family import Family
from minfer.effects.models.parts import Renaming

ROWS: Final = (
    Family(
        "Starcoder2ForCausalLM",
        "starcoder2",
        {
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "use_bias": True,
            "tie_word_embeddings": True,
            "eos_token_id": 50256,
        },
        "uniform",
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp_bias="use_bias",
        activation="ungated_gelu_tanh",
        layer_norm=True,
        norm_bias=True,
        renamings=(
            Renaming(r"\.c_fc\.", ".up_proj."),
            Renaming(r"\.c_proj\.", ".down_proj."),
        ),
        aliases={"norm_epsilon": "rms_norm_eps"},
    ),
)

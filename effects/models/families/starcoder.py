"""Rows of the family table: StarCoder 2, of BigCode."""

from typing import Final

from minfer.effects.models.families.attention_keys import Biases, Windows
from minfer.effects.models.families.family import Family
from minfer.effects.models.families.layer_keys import Norms, StoredNames
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
        windows=Windows(where="uniform"),
        biases=Biases(qkv="use_bias", out="use_bias", mlp="use_bias"),
        activation="ungated_gelu_tanh",
        norms=Norms(layer_norm=True, bias=True),
        stored=StoredNames(
            renamings=(
                Renaming(r"\.c_fc\.", ".up_proj."),
                Renaming(r"\.c_proj\.", ".down_proj."),
            )
        ),
        aliases={"norm_epsilon": "rms_norm_eps"},
    ),
)

"""Rows of the family table: SmolLM, of Hugging Face."""

from typing import Final

from minfer.effects.models.families.attention_keys import Biases, Positions, Windows
from minfer.effects.models.families.common import BIAS
from minfer.effects.models.families.family import Family

ROWS: Final = (
    Family(
        "SmolLM3ForCausalLM",
        "smollm3",
        {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "rope_theta": 2000000.0,
            "tie_word_embeddings": True,
            "eos_token_id": 128001,
        },
        windows=Windows(where="unrotated"),
        biases=Biases(qkv=BIAS, out=BIAS, mlp="mlp_bias"),
        positions=Positions(rotated_layers="listed"),
    ),
)

"""Rows of the family table: Seed-OSS, of ByteDance."""

from typing import Final

from minfer.effects.models.families.attention_keys import Biases
from minfer.effects.models.families.common import BIAS
from minfer.effects.models.families.family import Family

ROWS: Final = (
    Family(
        "SeedOssForCausalLM",
        "seed_oss",
        {
            "max_position_embeddings": 524288,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_bias": True,
            "eos_token_id": 2,
        },
        biases=Biases(qkv=BIAS, out="attention_out_bias", mlp="mlp_bias"),
    ),
)

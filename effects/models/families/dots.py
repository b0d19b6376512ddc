"""Rows of the family table: dots.llm1, of rednote-hilab."""

from typing import Final

from minfer.effects.models.families.attention_keys import Biases, QkNorm, Windows
from minfer.effects.models.families.common import BIAS, SIGMOID
from minfer.effects.models.families.family import Family

ROWS: Final = (
    Family(
        "Dots1ForCausalLM",
        "dots1",
        {
            "max_position_embeddings": 2048,
            "num_key_value_heads": 32,
            "moe_intermediate_size": 1408,
            "sliding_window": 4096,
            "max_window_layers": 62,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
        },
        windows=Windows(where="above"),
        biases=Biases(qkv=BIAS, out=BIAS),
        qk_norm=QkNorm(present=True),
        experts=SIGMOID,
    ),
)

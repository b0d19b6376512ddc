"""Rows of the family table: Granite, of IBM."""

from typing import Final

from minfer.effects.models.families.common import BIAS, LLAMA
from minfer.effects.models.families.family import Family

ROWS: Final = (
    Family(
        "GraniteForCausalLM",
        "granite",
        LLAMA,
        "none",
        BIAS,
        BIAS,
        "mlp_bias",
        embedding_multiplier="embedding_multiplier",
        residual_multiplier="residual_multiplier",
        score_multiplier="attention_multiplier",
        logit_divisor="logits_scaling",
    ),
)

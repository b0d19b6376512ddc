"""Rows of the family table: Llama, of Meta."""

from typing import Final

from minfer.effects.models.families.common import BIAS, LLAMA
from minfer.effects.models.families.family import Family

ROWS: Final = (
    Family("LlamaForCausalLM", "llama", LLAMA, "none", BIAS, BIAS, "mlp_bias"),
)

"""The family table: all rows, by the names that configs have for them."""

from collections.abc import Mapping
from typing import Final

from minfer.effects.models.families import (
    cohere,
    deepseek,
    falcon,
    gemma,
    glm,
    gpt_oss,
    granite,
    llama,
    mimo,
    mistral,
    olmo,
    phi,
    qwen,
    seed_oss,
    smollm,
    stablelm,
    starcoder,
)
from minfer.effects.models.families.family import Family

_ROWS: Final = (
    *qwen.ROWS,
    *llama.ROWS,
    *mistral.ROWS,
    *mimo.ROWS,
    *glm.ROWS,
    *deepseek.ROWS,
    *gpt_oss.ROWS,
    *gemma.ROWS,
    *granite.ROWS,
    *smollm.ROWS,
    *olmo.ROWS,
    *phi.ROWS,
    *seed_oss.ROWS,
    *cohere.ROWS,
    *stablelm.ROWS,
    *falcon.ROWS,
    *starcoder.ROWS,
)
# Other names of a `model_type`: Kimi K2 is DeepSeek-V3 with other sizes.
MODEL_TYPE_ALIASES: Final[Mapping[str, str]] = {"kimi_k2": "deepseek_v3"}
FAMILIES: Final[Mapping[str, Family]] = {row.architecture: row for row in _ROWS}
BY_MODEL_TYPE: Final[Mapping[str, Family]] = {row.model_type: row for row in _ROWS}

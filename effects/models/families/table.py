"""The family table: all rows, by the names that configs have for them."""

from collections.abc import Mapping
from typing import Final

from minfer.effects.models.families import (
    deepseek,
    dots,
    ernie,
    gemma,
    glm,
    gpt_oss,
    granite,
    hunyuan,
    laguna,
    llama,
    minimax,
    mistral,
    olmo,
    phi,
    qwen,
    seed_oss,
    smollm,
    upstage,
)
from minfer.effects.models.families.family import Family

_ROWS: Final = (
    *qwen.ROWS,
    *llama.ROWS,
    *mistral.ROWS,
    *glm.ROWS,
    *deepseek.ROWS,
    *ernie.ROWS,
    *dots.ROWS,
    *upstage.ROWS,
    *gpt_oss.ROWS,
    *hunyuan.ROWS,
    *minimax.ROWS,
    *laguna.ROWS,
    *gemma.ROWS,
    *granite.ROWS,
    *smollm.ROWS,
    *olmo.ROWS,
    *phi.ROWS,
    *seed_oss.ROWS,
)
FAMILIES: Final[Mapping[str, Family]] = {row.architecture: row for row in _ROWS}
ALIASES: Final[Mapping[str, Family]] = {
    name: row for row in _ROWS for name in row.aliases
}
BY_MODEL_TYPE: Final[Mapping[str, Family]] = {row.model_type: row for row in _ROWS}

"""The family table: all rows, by the names that configs have for them."""

from collections.abc import Mapping
from typing import Final

from minfer.effects.models.families import (
    cohere,
    deepseek,
    dots,
    ernie,
    falcon,
    gemma,
    glm,
    gpt_oss,
    granite,
    hunyuan,
    jamba,
    kimi,
    laguna,
    lfm,
    llama,
    mimo,
    minimax,
    mistral,
    nemotron,
    olmo,
    phi,
    qwen,
    seed_oss,
    smollm,
    stablelm,
    starcoder,
    upstage,
)
from minfer.effects.models.families.family import Family

_ROWS: Final = (
    *qwen.ROWS,
    *llama.ROWS,
    *mistral.ROWS,
    *mimo.ROWS,
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
    *cohere.ROWS,
    *stablelm.ROWS,
    *falcon.ROWS,
    *starcoder.ROWS,
    *lfm.ROWS,
    *nemotron.ROWS,
    *kimi.ROWS,
    *jamba.ROWS,
)
# Other names of a `model_type`: Kimi K2 is DeepSeek-V3 with other sizes.
MODEL_TYPE_ALIASES: Final[Mapping[str, str]] = {"kimi_k2": "deepseek_v3"}
FAMILIES: Final[Mapping[str, Family]] = {row.architecture: row for row in _ROWS}
CLASS_ALIASES: Final[Mapping[str, Family]] = {
    name: row for row in _ROWS for name in row.class_aliases
}
BY_MODEL_TYPE: Final[Mapping[str, Family]] = {row.model_type: row for row in _ROWS}

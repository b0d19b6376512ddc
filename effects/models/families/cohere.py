"""Rows of the family table: Command R, R+ and R7B, of Cohere."""

from typing import Any, Final

from attrs import evolve

from minfer.effects.models.families.attention_keys import (
    Biases,
    Positions,
    QkNorm,
    Windows,
)
from minfer.effects.models.families.common import BIAS
from minfer.effects.models.families.family import Family
from minfer.effects.models.families.layer_keys import (
    Factors,
    LayerExtras,
    NormNames,
    Norms,
)

_COHERE: Final[dict[str, Any]] = {
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
    "eos_token_id": 255001,
}
_COMMAND_R: Final = Family(
    "CohereForCausalLM",
    "cohere",
    _COHERE | {"rope_theta": 500000.0},
    biases=Biases(qkv=BIAS, out=BIAS),
    qk_norm=QkNorm(present="use_qk_norm", factors="stacked"),
    norms=Norms(layer_norm=True, names=NormNames(before_feed="")),
    extras=LayerExtras(parallel=True),
    positions=Positions(interleaved=True),
    factors=Factors(logits="logit_scale"),
    aliases={"layer_norm_eps": "rms_norm_eps"},
)
ROWS: Final = (
    _COMMAND_R,
    evolve(
        _COMMAND_R,
        architecture="Cohere2ForCausalLM",
        model_type="cohere2",
        defaults=_COHERE | {"sliding_window": 4096, "sliding_window_pattern": 4},
        windows=Windows(where="pattern"),
        positions=Positions(interleaved=True, rotated_layers="windowed"),
        qk_norm=evolve(_COMMAND_R.qk_norm, present=False),
    ),
)

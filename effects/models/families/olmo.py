"""Rows of the family table: OLMo and OLMoE, of the Allen Institute for AI."""

from typing import Final

from minfer.effects.models.families.attention_keys import (
    Biases,
    Positions,
    QkNorm,
    RopeBases,
    Windows,
)
from minfer.effects.models.families.common import BIAS
from minfer.effects.models.families.expert_keys import ExpertKeys
from minfer.effects.models.families.family import Family
from minfer.effects.models.families.layer_keys import NormNames, Norms

# Results are normalised, and not what sublayers read.
_NORMS: Final = NormNames(
    before_attention="",
    after_attention="post_attention_layernorm",
    before_feed="",
    after_feed="post_feedforward_layernorm",
)
ROWS: Final = (
    Family(
        "Olmo2ForCausalLM",
        "olmo2",
        {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "eos_token_id": 50279},
        biases=Biases(qkv=BIAS, out=BIAS),
        qk_norm=QkNorm(present=True, over="all"),
        norms=Norms(names=_NORMS),
    ),
    Family(
        "Olmo3ForCausalLM",
        "olmo3",
        {
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 50279,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        windows=Windows(where="pattern"),
        biases=Biases(qkv=BIAS, out=BIAS),
        qk_norm=QkNorm(present=True, over="all"),
        norms=Norms(names=_NORMS),
        positions=Positions(bases=RopeBases(full=5e5, sliding=5e5)),
    ),
    # Here what sublayers read is normalised, as in Llama.
    Family(
        "OlmoeForCausalLM",
        "olmoe",
        {
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 50279,
            "num_experts_per_tok": 8,
            "num_experts": 64,
        },
        biases=Biases(qkv=BIAS, out=BIAS),
        qk_norm=QkNorm(present=True, over="all"),
        experts=ExpertKeys(
            count=("num_local_experts", "num_experts"), inter="intermediate_size"
        ),
    ),
)

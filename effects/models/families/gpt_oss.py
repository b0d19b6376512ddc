"""Rows of the family table: gpt-oss, of OpenAI."""

from typing import Final

from minfer.effects.models.families.attention_keys import Biases, Scores, Windows
from minfer.effects.models.families.common import BIAS
from minfer.effects.models.families.expert_keys import ExpertKeys, Routing, StoredExperts
from minfer.effects.models.families.family import Family

_YARN: Final = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
ROWS: Final = (
    Family(
        "GptOssForCausalLM",
        "gpt_oss",
        {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "num_experts_per_tok": 4,
            "num_local_experts": 128,
            "attention_bias": True,
            "rope_theta": 150000.0,
            "rope_parameters": _YARN,
        },
        windows=Windows(where="pattern"),
        biases=Biases(qkv=BIAS, out=BIAS),
        scores=Scores(sinks=True),
        experts=ExpertKeys(
            count=("num_experts", "num_local_experts"),
            inter="intermediate_size",
            routing=Routing(normalise=True),
            bias=True,
            stored=StoredExperts(
                router="mlp.router", stacked=True, transposed=True, alternating=True
            ),
        ),
        activation="clamped",
    ),
)

"""Rows of the family table: Solar Open, of Upstage."""

from typing import Final

from attrs import evolve

from minfer.effects.models.families.attention_keys import Biases
from minfer.effects.models.families.common import BIAS, SIGMOID
from minfer.effects.models.families.family import Family

ROWS: Final = (
    Family(
        "SolarOpenForCausalLM",
        "solar_open",
        {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "moe_intermediate_size": 1280,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
        },
        biases=Biases(qkv=BIAS),
        experts=evolve(SIGMOID, sparse=evolve(SIGMOID.sparse, first_dense="")),
    ),
)

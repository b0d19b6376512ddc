"""Rows of the family table: MiMo-V2-Flash, of Xiaomi."""

from typing import Final

from attrs import evolve

from minfer.effects.models.families.attention_keys import (
    Biases,
    HeadKeys,
    Positions,
    RopeBases,
    Scores,
    Windows,
)
from minfer.effects.models.families.common import BIAS, SIGMOID
from minfer.effects.models.families.expert_keys import SharedExperts
from minfer.effects.models.families.family import Family
from minfer.effects.models.families.layer_keys import StoredNames
from minfer.effects.models.families.mtp_keys import MIMO_MTP

ROWS: Final = (
    Family(
        "MiMoV2FlashForCausalLM",
        "mimo_v2_flash",
        {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 4,
            "head_dim": 192,
            "v_head_dim": 128,
            "rms_norm_eps": 1e-5,
            "sliding_window": 129,
            "sliding_window_pattern": 6,
            "attention_value_scale": 0.707,
            "partial_rotary_factor": 0.334,
            "moe_intermediate_size": 2048,
            "num_experts_per_tok": 8,
            "n_routed_experts": 256,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
        },
        windows=Windows(where="pattern", first_full=True),
        biases=Biases(qkv=BIAS),
        scores=Scores(sinks="windowed", sinks_name="attention_sink_bias"),
        heads=HeadKeys(
            window_kv_multiple=2,
            value_dim="v_head_dim",
            value_scale="attention_value_scale",
        ),
        positions=Positions(
            bases=RopeBases(full=5e6, sliding=1e4, sliding_key="swa_rope_theta"),
            partial=True,
        ),
        experts=evolve(
            SIGMOID,
            shared=SharedExperts(),
            sparse=evolve(SIGMOID.sparse, layer_types="mlp_layer_types"),
        ),
        stored=StoredNames(skipped=("model.mtp.",)),
        mtp=MIMO_MTP,
    ),
)

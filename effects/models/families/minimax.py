"""Rows of the family table: MiniMax M2."""

from typing import Final

from attrs import evolve

from minfer.effects.models.families.attention_keys import Positions, QkNorm
from minfer.effects.models.families.common import MIXTRAL_EXPERTS, MIXTRAL_NAMES
from minfer.effects.models.families.expert_keys import Routing
from minfer.effects.models.families.family import Family

ROWS: Final = (
    Family(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        {
            "max_position_embeddings": 196608,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_theta": 5e6,
            "eos_token_id": 200020,
            "num_experts_per_tok": 8,
            "num_local_experts": 256,
        },
        qk_norm=QkNorm(present=True, over="all"),
        positions=Positions(partial=True, rotary_dim="rotary_dim"),
        experts=evolve(
            MIXTRAL_EXPERTS,
            routing=Routing(
                scores="sigmoid",
                normalise=True,
                correction="block_sparse_moe.e_score_correction_bias",
                float32=True,
            ),
        ),
        stored=MIXTRAL_NAMES,
    ),
)

"""Rows of the family table: Mistral, Ministral and Mixtral, of Mistral AI."""

from typing import Final

from minfer.effects.models.families.common import LLAMA
from minfer.effects.models.families.family import ExpertKeys, Family
from minfer.effects.models.parts import Renaming

_LONG: Final = {"max_position_embeddings": 131072, "num_key_value_heads": 8}
_MISTRAL: Final = LLAMA | _LONG | {"sliding_window": 4096}
ROWS: Final = (
    Family("MistralForCausalLM", "mistral", _MISTRAL, "every"),
    # Ministral 8B is published as `mistral` with `layer_types`.
    Family("MinistralForCausalLM", "ministral", _MISTRAL, "every"),
    Family(
        "MixtralForCausalLM",
        "mixtral",
        {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 2,
            "rope_theta": 1e6,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
        },
        "uniform",
        experts=ExpertKeys(
            count=("num_experts", "num_local_experts"),
            inter="intermediate_size",
            normalise=True,
            router="block_sparse_moe.gate",
            experts="block_sparse_moe.experts",
            matrices=("w1", "w3", "w2"),
        ),
        renamings=(Renaming(r"\.mlp\.", ".block_sparse_moe."),),  # of transformers 5
    ),
)

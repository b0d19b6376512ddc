"""Rows of the family table: Qwen, of Alibaba."""

from typing import Final

from minfer.effects.models.families.attention_keys import Biases, QkNorm, Windows
from minfer.effects.models.families.common import BIAS
from minfer.effects.models.families.expert_keys import (
    ExpertKeys,
    SharedExperts,
    SparseLayers,
)
from minfer.effects.models.families.family import Family

_QWEN: Final = {"max_position_embeddings": 32768, "num_key_value_heads": 32}
_QWEN2: Final = _QWEN | {"sliding_window": 4096, "max_window_layers": 28}
_QWEN3: Final = _QWEN2 | {"head_dim": 128}
_SPARSE: Final = {"decoder_sparse_step": 1, "mlp_only_layers": []}
SPARSE_AND_DENSE: Final = SparseLayers(
    dense="mlp_only_layers", step="decoder_sparse_step"
)
_QWEN_EXPERTS: Final = ExpertKeys(
    count=("num_experts", "num_local_experts"),
    sparse=SPARSE_AND_DENSE,
)
ROWS: Final = (
    Family(
        "Qwen2ForCausalLM",
        "qwen2",
        _QWEN2,
        windows=Windows(where="upper"),
        biases=Biases(qkv=True),
    ),
    Family(
        "Qwen3ForCausalLM",
        "qwen3",
        _QWEN3,
        windows=Windows(where="upper"),
        biases=Biases(qkv=BIAS, out=BIAS),
        qk_norm=QkNorm(present=True),
    ),
    Family(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        _SPARSE
        | {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 16,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts_per_tok": 4,
            "num_experts": 60,
            "qkv_bias": True,
        },
        windows=Windows(where="lower"),
        biases=Biases(qkv="qkv_bias"),
        experts=ExpertKeys(
            count=("num_experts",),
            sparse=SPARSE_AND_DENSE,
            shared=SharedExperts(
                width="shared_expert_intermediate_size",
                gate=True,
                name="mlp.shared_expert",
            ),
        ),
    ),
    Family(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        _SPARSE
        | {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_local_experts": 128,
        },
        windows=Windows(where="flag"),
        biases=Biases(qkv=BIAS, out=BIAS),
        qk_norm=QkNorm(present=True),
        experts=_QWEN_EXPERTS,
    ),
)

"""Rows of the family table: Qwen, of Alibaba."""

from typing import Final

from attrs import evolve

from minfer.effects.models.families.attention_keys import (
    Biases,
    HeadGateKeys,
    HeadKeys,
    Positions,
    QkNorm,
    Windows,
)
from minfer.effects.models.families.common import BIAS
from minfer.effects.models.families.expert_keys import (
    ExpertKeys,
    Routing,
    SharedExperts,
    SparseLayers,
)
from minfer.effects.models.families.family import Family
from minfer.effects.models.families.layer_keys import Norms, StoredNames
from minfer.effects.models.families.mtp_keys import QWEN_MTP
from minfer.effects.models.families.recurrent_keys import GatedDeltaKeys, HybridLayers

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
_SHARED_EXPERT: Final = SharedExperts(
    width="shared_expert_intermediate_size", gate=True, name="mlp.shared_expert"
)
# Of Qwen3-Next and 3.5: gated delta nets, and every few layers gated attention.
_DELTA: Final = {
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_NEXT: Final = Family(
    "Qwen3NextForCausalLM",
    "qwen3_next",
    _DELTA
    | _SPARSE
    | {
        "num_key_value_heads": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 10,
        "num_experts": 512,
        "norm_topk_prob": True,
    },
    hybrid=HybridLayers(interval="full_attention_interval"),
    recurrent=GatedDeltaKeys(by_key_head=True),
    biases=Biases(qkv=BIAS, out=BIAS),
    qk_norm=QkNorm(present=True),
    heads=HeadKeys(gate=HeadGateKeys(name="", activation="sigmoid")),
    positions=Positions(partial=True),
    norms=Norms(offset=True),
    experts=ExpertKeys(
        count=("num_experts",), sparse=SPARSE_AND_DENSE, shared=_SHARED_EXPERT
    ),
    stored=StoredNames(skipped=("mtp.",)),
    mtp=QWEN_MTP,
)
# Published as text halves (multimodal.py).
_DELTA_35: Final = evolve(
    _NEXT,
    architecture="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    class_aliases=("Qwen3_5ForConditionalGeneration",),  # of a text half alone
    defaults=_DELTA | {"num_key_value_heads": 4},
    recurrent=GatedDeltaKeys(by_key_head=False),
    positions=Positions(partial=True, sections=True),
    experts=None,
)
_DELTA_35_MOE: Final = evolve(
    _DELTA_35,
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    class_aliases=("Qwen3_5MoeForConditionalGeneration",),
    defaults=_DELTA
    | {
        "num_key_value_heads": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8,
        "num_experts": 256,
    },
    experts=ExpertKeys(
        count=("num_experts",), routing=Routing(normalise=True), shared=_SHARED_EXPERT
    ),
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
            shared=_SHARED_EXPERT,
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
    _NEXT,
    _DELTA_35,
    _DELTA_35_MOE,
)

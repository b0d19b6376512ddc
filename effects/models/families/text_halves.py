"""Text halves of multimodal models that are models of the family table with other
defaults: their configs have a `model_type` of their own (Qwen-VL, GLM-V).

Their positions have three sections in a prompt with images or video (M-RoPE): time,
height, width. Those of text are equal, so that `mrope_section` and `mrope_interleaved`,
which say what dimensions turn by which of them, change nothing; they are checked.
"""

from collections.abc import Mapping
from typing import Final

from attrs import evolve

from minfer.effects.models.families.attention_keys import (
    Biases,
    Positions,
    QkNorm,
    Windows,
)
from minfer.effects.models.families.expert_keys import ExpertKeys, Routing, StoredExperts
from minfer.effects.models.families.family import Family
from minfer.effects.models.families.layer_keys import Factors
from minfer.effects.models.families.qwen import SPARSE_AND_DENSE
from minfer.effects.models.families.table import BY_MODEL_TYPE

_SIZES_32: Final = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}
_QWEN2: Final = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": 4096,
    "max_window_layers": 80,
    "eos_token_id": 151645,
}
_QWEN3: Final = {
    "vocab_size": 151936,
    "max_position_embeddings": 128000,
    "rope_theta": 500000.0,
}
_ROWS: Final = (
    # transformers makes Ministral of what has `layer_types`, but not of a text half.
    evolve(BY_MODEL_TYPE["mistral"], windows=Windows(where="uniform")),
    # The class of the whole does not cap logits; a config that says so is refused.
    evolve(BY_MODEL_TYPE["gemma3_text"], factors=Factors(embedding_root=True)),
    *(
        evolve(
            BY_MODEL_TYPE["qwen2"],
            architecture=f"{name}ForConditionalGeneration",
            model_type=model_type,
            defaults=_QWEN2,
            positions=Positions(sections=True),
        )
        for name, model_type in (
            ("Qwen2VL", "qwen2_vl_text"),
            ("Qwen2_5_VL", "qwen2_5_vl_text"),
        )
    ),
    evolve(
        BY_MODEL_TYPE["qwen3"],
        architecture="Qwen3VLForConditionalGeneration",
        model_type="qwen3_vl_text",
        defaults=_QWEN3
        | _SIZES_32
        | {"hidden_size": 4096, "intermediate_size": 22016, "head_dim": 128},
        windows=Windows(),
        positions=Positions(sections=True),
    ),
    evolve(
        BY_MODEL_TYPE["qwen3_moe"],
        architecture="Qwen3VLMoeForConditionalGeneration",
        model_type="qwen3_vl_moe_text",
        defaults=_QWEN3
        | {
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 4,
            "num_local_experts": 60,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        windows=Windows(),
        experts=ExpertKeys(
            count=("num_experts", "num_local_experts"),
            routing=Routing(normalise=True),
            sparse=SPARSE_AND_DENSE,
            stored=StoredExperts(maybe_transposed=True),
        ),
        positions=Positions(sections=True),
    ),
    evolve(  # GLM-4.1V and 4.6V-Flash
        BY_MODEL_TYPE["glm4"],
        architecture="Glm4vForConditionalGeneration",
        model_type="glm4v_text",
        defaults={
            "vocab_size": 151552,
            "hidden_size": 4096,
            "intermediate_size": 13696,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
        },
        biases=Biases(qkv=True),
        eos_ids=(),
        positions=evolve(BY_MODEL_TYPE["glm4"].positions, sections=True),
    ),
    evolve(  # GLM-4.5V and 4.6V
        BY_MODEL_TYPE["glm4_moe"],
        architecture="Glm4vMoeForConditionalGeneration",
        model_type="glm4v_moe_text",
        defaults={
            **BY_MODEL_TYPE["glm4_moe"].defaults,
            "vocab_size": 151424,
            "hidden_size": 4096,
            "intermediate_size": 10944,
            "num_hidden_layers": 46,
            "num_attention_heads": 96,
            "max_position_embeddings": 65536,
            "attention_bias": True,
        },
        qk_norm=QkNorm(),
        positions=evolve(BY_MODEL_TYPE["glm4_moe"].positions, sections=True),
    ),
)
TEXT_HALVES: Final[Mapping[str, Family]] = {row.model_type: row for row in _ROWS}

"""Rows of the family table: Llama, of Meta."""

from typing import Final

from minfer.effects.models.families.common import BIAS, LLAMA
from minfer.effects.models.families.family import ExpertKeys, Family

ROWS: Final = (
    Family("LlamaForCausalLM", "llama", LLAMA, "none", BIAS, BIAS, "mlp_bias"),
    Family(
        "Llama4ForCausalLM",
        "llama4_text",
        {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 2,
            "rope_theta": 500000.0,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "num_experts_per_tok": 1,
            "num_local_experts": 16,
            "use_qk_norm": True,
            "attention_chunk_size": 8192,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        },
        "chunked",
        BIAS,
        BIAS,
        unit_heads="use_qk_norm",
        interleaved_rotary=True,
        rotated_layers="listed",
        query_scale="unrotated",
        dense_width="intermediate_size_mlp",
        feed_name="feed_forward",
        experts=ExpertKeys(
            count=("num_local_experts",),
            inter="intermediate_size",
            scores="sigmoid",
            normalise=False,
            shared="intermediate_size",
            sparse_step="interleave_moe_layer_step",
            sparse_layers="moe_layers",
            weighs_inputs=True,
            router="feed_forward.router",
            experts="feed_forward.experts",
            shared_experts="feed_forward.shared_expert",
            stacked=True,
            transposed=True,
        ),
    ),
)

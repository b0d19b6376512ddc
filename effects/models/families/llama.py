"""Rows of the family table: Llama, of Meta."""

from typing import Final

from minfer.effects.models.families.attention_keys import (
    Biases,
    Positions,
    QkNorm,
    Windows,
)
from minfer.effects.models.families.common import BIAS, LLAMA
from minfer.effects.models.families.expert_keys import (
    ExpertKeys,
    Routing,
    SharedExperts,
    SparseLayers,
    StoredExperts,
)
from minfer.effects.models.families.family import Family
from minfer.effects.models.families.layer_keys import FeedForward, StoredNames

ROWS: Final = (
    Family(
        "LlamaForCausalLM",
        "llama",
        LLAMA,
        biases=Biases(qkv=BIAS, out=BIAS, mlp="mlp_bias"),
    ),
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
        windows=Windows(where="chunked"),
        biases=Biases(qkv=BIAS, out=BIAS),
        qk_norm=QkNorm(unit="use_qk_norm"),
        positions=Positions(
            interleaved=True, rotated_layers="listed", query_scale="unrotated"
        ),
        feed_forward=FeedForward(width="intermediate_size_mlp"),
        stored=StoredNames(feed_forward="feed_forward"),
        experts=ExpertKeys(
            count=("num_local_experts",),
            inter="intermediate_size",
            routing=Routing(scores="sigmoid", normalise=False, weighs_inputs=True),
            shared=SharedExperts(
                width="intermediate_size", name="feed_forward.shared_expert"
            ),
            sparse=SparseLayers(step="interleave_moe_layer_step", listed="moe_layers"),
            stored=StoredExperts(
                router="feed_forward.router",
                experts="feed_forward.experts",
                stacked=True,
                transposed=True,
            ),
        ),
    ),
)

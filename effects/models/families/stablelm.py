"""Rows of the family table: StableLM, of Stability AI."""

from typing import Final

from minfer.effects.models.families.family import Family, NormNames, Variant
from minfer.effects.models.parts import Renaming

ROWS: Final = (
    Family(
        "StableLmForCausalLM",
        "stablelm",
        {
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
            "eos_token_id": 0,
        },
        qkv_bias="use_qkv_bias",
        qk_norm="qk_layernorm",
        qk_norm_factors="listed",
        layer_norm=True,
        norm_bias=True,
        partial_rotary=True,
        renamings=(Renaming(r"\.([qk])_layernorm\.norms\.", r".\1_norm."),),
        aliases={"layer_norm_eps": "rms_norm_eps"},
        variants=(
            Variant(when={}, config={"head_dim": None}),  # transformers derives it
            Variant(
                when={"use_parallel_residual": True},
                row={"parallel": True, "norm_names": NormNames(before_feed="")},
            ),
        ),
    ),
)

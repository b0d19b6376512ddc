"""Rows of the family table: StableLM, of Stability AI."""

from typing import Final

from minfer.effects.models.families.attention_keys import Biases, Positions, QkNorm
from minfer.effects.models.families.family import Family, Variant
from minfer.effects.models.families.layer_keys import (
    LayerExtras,
    NormNames,
    Norms,
    StoredNames,
)
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
        biases=Biases(qkv="use_qkv_bias"),
        qk_norm=QkNorm(present="qk_layernorm", factors="listed"),
        norms=Norms(layer_norm=True, bias=True),
        positions=Positions(partial=True),
        stored=StoredNames(
            renamings=(Renaming(r"\.([qk])_layernorm\.norms\.", r".\1_norm."),)
        ),
        aliases={"layer_norm_eps": "rms_norm_eps"},
        variants=(
            Variant(
                when={"use_parallel_residual": True},
                row={
                    "extras": LayerExtras(parallel=True),
                    "norms": Norms(
                        layer_norm=True, bias=True, names=NormNames(before_feed="")
                    ),
                },
            ),
        ),
    ),
)

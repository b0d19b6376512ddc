"""Rows of the family table: Phi, of Microsoft."""

from typing import Final

from minfer.effects.models.families.attention_keys import Biases, Positions, Windows
from minfer.effects.models.families.family import Family
from minfer.effects.models.families.layer_keys import (
    LayerExtras,
    NormNames,
    Norms,
    StoredNames,
)
from minfer.effects.models.parts import Renaming

ROWS: Final = (
    Family(  # Phi-3, Phi-3.5-mini, Phi-4 and Phi-4-mini
        "Phi3ForCausalLM",
        "phi3",
        {
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 32000,
        },
        windows=Windows(where="uniform"),
        positions=Positions(partial=True, longrope=True),
        stored=StoredNames(qkv="qkv_proj", gate_up="gate_up_proj"),
    ),
    Family(  # Phi-1, 1.5 and 2
        "PhiForCausalLM",
        "phi",
        {
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "eos_token_id": 2,
        },
        biases=Biases(qkv=True, out=True, mlp=True, lm_head=True),
        activation="ungated_gelu_tanh",
        norms=Norms(layer_norm=True, bias=True, names=NormNames(before_feed="")),
        extras=LayerExtras(parallel=True),
        positions=Positions(partial=True),
        stored=StoredNames(
            renamings=(
                Renaming(r"\.self_attn\.dense\.", ".self_attn.o_proj."),
                Renaming(r"\.fc1\.", ".up_proj."),
                Renaming(r"\.fc2\.", ".down_proj."),
                Renaming(r"^model\.final_layernorm\.", "model.norm."),
            )
        ),
        aliases={"layer_norm_eps": "rms_norm_eps"},
    ),
)

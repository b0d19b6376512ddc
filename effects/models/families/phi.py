"""Rows of the family table: Phi, of Microsoft."""

from typing import Final

from minfer.effects.models.families.family import Family, NormNames
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
        "uniform",
        partial_rotary=True,
        longrope=True,
        stored_qkv="qkv_proj",
        stored_gate_up="gate_up_proj",
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
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        head_bias=True,
        activation="ungated_gelu_tanh",
        layer_norm=True,
        norm_bias=True,
        norm_names=NormNames(before_feed=""),
        parallel=True,
        partial_rotary=True,
        renamings=(
            Renaming(r"\.self_attn\.dense\.", ".self_attn.o_proj."),
            Renaming(r"\.fc1\.", ".up_proj."),
            Renaming(r"\.fc2\.", ".down_proj."),
            Renaming(r"^model\.final_layernorm\.", "model.norm."),
        ),
        aliases={"layer_norm_eps": "rms_norm_eps"},
    ),
)

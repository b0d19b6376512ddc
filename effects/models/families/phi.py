"""Rows of the family table: Phi, of Microsoft."""

from typing import Final

from minfer.effects.models.families.family import Family

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
)

"""Rows of the family table: Kimi-Linear, of Moonshot AI. Kimi K2 is of DeepSeek's
form.
"""

from typing import Final

from attrs import evolve

from minfer.effects.models.families.attention_keys import Biases, Positions
from minfer.effects.models.families.common import BIAS, MLA, SIGMOID
from minfer.effects.models.families.family import Family, Variant
from minfer.effects.models.families.layer_keys import StoredNames
from minfer.effects.models.families.recurrent_keys import HybridLayers, KimiDeltaKeys
from minfer.effects.models.parts import Renaming

_INNER: Final = "linear_attn_config"  # in published configs
_EXPERTS: Final = evolve(
    SIGMOID,
    count=("num_experts", "num_local_experts"),
    sparse=evolve(SIGMOID.sparse, layer_types="mlp_layer_types"),
)
ROWS: Final = (
    Family(
        "KimiLinearForCausalLM",
        "kimi_linear",
        MLA
        | {
            "max_position_embeddings": 1048576,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 163586,
            "q_lora_rank": None,
            "linear_head_dim": 128,
            "linear_num_heads": 32,
            "linear_conv_kernel_dim": 4,
            "moe_intermediate_size": 1024,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.446,
            "first_k_dense_replace": 1,
        },
        attention="mla",
        hybrid=HybridLayers(
            numbered={
                f"{_INNER}.full_attn_layers": "attention",
                f"{_INNER}.kda_layers": "recurrent",
            }
        ),
        recurrent=KimiDeltaKeys(),
        experts=_EXPERTS,
        biases=Biases(qkv=BIAS, out=BIAS),
        positions=Positions(rotated_layers="none"),
        stored=StoredNames(
            renamings=(
                Renaming(r"\.block_sparse_moe\.", ".mlp."),
                Renaming(r"\.w1\.", ".gate_proj."),
                Renaming(r"\.w3\.", ".up_proj."),
                Renaming(r"\.w2\.", ".down_proj."),
                Renaming(r"\.forget_gate\.", "."),  # of transformers 5, in adapters
            )
        ),
        # transformers' class does not read it.
        variants=(Variant(when={}, config={"head_dim": None}),),
        synonyms={
            "model_max_length": "max_position_embeddings",
            "moe_renormalize": "norm_topk_prob",
            "num_expert_group": "n_group",
            "num_experts_per_token": "num_experts_per_tok",
            "num_shared_experts": "n_shared_experts",
        },
        nested={
            _INNER: {
                "head_dim": "linear_head_dim",
                "num_heads": "linear_num_heads",
                "short_conv_kernel_size": "linear_conv_kernel_dim",
                "full_attn_layers": f"{_INNER}.full_attn_layers",
                "kda_layers": f"{_INNER}.kda_layers",
            }
        },
    ),
)

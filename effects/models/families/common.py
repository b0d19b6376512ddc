"""Keys and values that rows of several files share."""

from typing import Final

from minfer.effects.models.families.expert_keys import (
    ExpertKeys,
    Routing,
    SharedExperts,
    SparseLayers,
    StoredExperts,
)
from minfer.effects.models.families.layer_keys import StoredNames
from minfer.effects.models.parts import Renaming

LLAMA: Final = {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2}
BIAS: Final = "attention_bias"
SIGMOID: Final = ExpertKeys(
    count=("num_local_experts", "n_routed_experts"),
    shared=SharedExperts(count="n_shared_experts"),
    sparse=SparseLayers(first_dense="first_k_dense_replace"),
    routing=Routing(
        scores="sigmoid",
        correction="mlp.gate.e_score_correction_bias",
        groups=True,
        scaling="routed_scaling_factor",
        float32=True,
    ),
)
# Of Mixtral, and of MiniMax M2 but for its routing
MIXTRAL_EXPERTS: Final = ExpertKeys(
    count=("num_experts", "num_local_experts"),
    inter="intermediate_size",
    routing=Routing(normalise=True),
    stored=StoredExperts(
        router="block_sparse_moe.gate",
        experts="block_sparse_moe.experts",
        matrices=("w1", "w3", "w2"),
    ),
)
MIXTRAL_NAMES: Final = StoredNames(
    renamings=(Renaming(r"\.mlp\.", ".block_sparse_moe."),)  # of transformers 5
)
MLA: Final = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_interleave": True,
}

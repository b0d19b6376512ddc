"""Rows of the family table: Granite, of IBM."""

from typing import Final

from attrs import evolve

from minfer.effects.models.families.common import BIAS, LLAMA
from minfer.effects.models.families.family import ExpertKeys, Family

_DENSE: Final = Family(
    "GraniteForCausalLM",
    "granite",
    LLAMA,
    "none",
    BIAS,
    BIAS,
    "mlp_bias",
    embedding_multiplier="embedding_multiplier",
    residual_multiplier="residual_multiplier",
    score_multiplier="attention_multiplier",
    logit_divisor="logits_scaling",
)
_EXPERTS: Final = ExpertKeys(
    count=("num_local_experts",),
    inter="intermediate_size",
    normalise=True,
    router="block_sparse_moe.router.layer",
    experts="block_sparse_moe.experts",
    stacks=(
        "block_sparse_moe.input_linear.weight",
        "block_sparse_moe.output_linear.weight",
    ),
)
_SPARSE: Final = evolve(
    _DENSE,
    architecture="GraniteMoeForCausalLM",
    model_type="granitemoe",
    defaults=LLAMA | {"num_local_experts": 8, "num_experts_per_tok": 2},
    mlp_bias="",
    experts=_EXPERTS,
)
ROWS: Final = (
    _DENSE,
    _SPARSE,
    evolve(
        _SPARSE,
        architecture="GraniteMoeSharedForCausalLM",
        model_type="granitemoeshared",
        experts=evolve(
            _EXPERTS,
            shared="shared_intermediate_size",
            shared_experts="shared_mlp",
            shared_matrices=("input_linear", "output_linear"),
        ),
        defaults={**_SPARSE.defaults, "shared_intermediate_size": 0},
    ),
)

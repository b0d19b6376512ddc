"""Rows of the family table: Granite, of IBM."""

from typing import Final

from attrs import evolve

from minfer.effects.models.families.attention_keys import Biases, Scores
from minfer.effects.models.families.common import BIAS, LLAMA
from minfer.effects.models.families.expert_keys import (
    ExpertKeys,
    Routing,
    SharedExperts,
    StoredExperts,
)
from minfer.effects.models.families.family import Family
from minfer.effects.models.families.layer_keys import Factors

_DENSE: Final = Family(
    "GraniteForCausalLM",
    "granite",
    LLAMA,
    biases=Biases(qkv=BIAS, out=BIAS, mlp="mlp_bias"),
    factors=Factors(
        embedding="embedding_multiplier",
        residual="residual_multiplier",
        logit_divisor="logits_scaling",
    ),
    scores=Scores(multiplier="attention_multiplier"),
)
_EXPERTS: Final = ExpertKeys(
    count=("num_local_experts",),
    inter="intermediate_size",
    routing=Routing(normalise=True),
    stored=StoredExperts(
        router="block_sparse_moe.router.layer",
        experts="block_sparse_moe.experts",
        stacks=(
            "block_sparse_moe.input_linear.weight",
            "block_sparse_moe.output_linear.weight",
        ),
    ),
)
_SPARSE: Final = evolve(
    _DENSE,
    architecture="GraniteMoeForCausalLM",
    model_type="granitemoe",
    defaults=LLAMA | {"num_local_experts": 8, "num_experts_per_tok": 2},
    biases=Biases(qkv=BIAS, out=BIAS),
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
            shared=SharedExperts(
                width="shared_intermediate_size",
                name="shared_mlp",
                matrices=("input_linear", "output_linear"),
            ),
        ),
        defaults={**_SPARSE.defaults, "shared_intermediate_size": 0},
    ),
)

"""Rows of the family table: Granite, of IBM."""

from typing import Final

from attrs import evolve

from minfer.effects.models.families.attention_keys import Biases, Positions, Scores
from minfer.effects.models.families.common import BIAS, LLAMA
from minfer.effects.models.families.expert_keys import (
    ExpertKeys,
    Routing,
    SharedExperts,
    StoredExperts,
)
from minfer.effects.models.families.family import Family, Variant
from minfer.effects.models.families.layer_keys import Factors, FeedForward, StoredNames
from minfer.effects.models.families.recurrent_keys import HybridLayers, Mamba2Keys

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
_SHARED: Final = SharedExperts(
    width="shared_intermediate_size",
    name="shared_mlp",
    matrices=("input_linear", "output_linear"),
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
        experts=evolve(_EXPERTS, shared=_SHARED),
        defaults={**_SPARSE.defaults, "shared_intermediate_size": 0},
    ),
    evolve(  # Granite 4
        _SPARSE,
        architecture="GraniteMoeHybridForCausalLM",
        model_type="granitemoehybrid",
        experts=evolve(_EXPERTS, shared=_SHARED),
        defaults={
            **_SPARSE.defaults,
            "shared_intermediate_size": 1024,
            "mamba_n_heads": 128,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_head": "auto",
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_conv_bias": True,
        },
        hybrid=HybridLayers(
            listed=("layer_types", "layers_block_type"),
            names={
                "attention": "attention",
                "full_attention": "attention",
                "mamba": "recurrent",
                "linear_attention": "recurrent",
            },
        ),
        recurrent=Mamba2Keys(),
        positions=Positions(rotated_layers="none"),
        variants=(
            Variant(
                when={"position_embedding_type": "rope"}, row={"positions": Positions()}
            ),
            Variant(
                when={"num_local_experts": 0},
                row={
                    "experts": None,
                    "feed_forward": FeedForward(width="shared_intermediate_size"),
                    "stored": StoredNames(
                        feed_forward="shared_mlp",
                        gate_up="input_linear",
                        down="output_linear",
                    ),
                },
            ),
        ),
    ),
)

"""Rows of the family table: Nemotron-H and Nemotron 3, of NVIDIA."""

from typing import Final

from minfer.effects.models.families.attention_keys import Biases, Positions
from minfer.effects.models.families.expert_keys import (
    ExpertKeys,
    Routing,
    SharedExperts,
    StoredExperts,
)
from minfer.effects.models.families.family import Family
from minfer.effects.models.families.layer_keys import NormNames, Norms, StoredNames
from minfer.effects.models.families.recurrent_keys import HybridLayers, Mamba2Keys
from minfer.effects.models.parts import Renaming

_RENAMINGS: Final = {
    r"^backbone\.": "model.",
    r"\.embeddings\.": ".embed_tokens.",
    r"\.norm_f\.": ".norm.",
    r"\.mixer\.([qkvo])_proj\.": r".self_attn.\1_proj.",
}
_EXPERTS: Final = ExpertKeys(
    count=("num_local_experts", "n_routed_experts"),
    latent="moe_latent_size",
    routing=Routing(
        scores="sigmoid",
        correction="mixer.gate.e_score_correction_bias",
        groups=True,
        scaling="routed_scaling_factor",
        float32=True,
    ),
    shared=SharedExperts(
        width="moe_shared_expert_intermediate_size", name="mixer.shared_experts"
    ),
    stored=StoredExperts(
        router="mixer.gate",
        experts="mixer.experts",
        latent=("mixer.fc1_latent_proj", "mixer.fc2_latent_proj"),
    ),
)
ROWS: Final = (
    Family(
        "NemotronHForCausalLM",
        "nemotron_h",
        {
            "max_position_embeddings": 4096,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 21504,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 2,
            "ssm_state_size": 128,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "conv_kernel": 4,
            "use_conv_bias": True,
            "time_step_min": 0.001,
            "n_routed_experts": 8,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
        },
        hybrid=HybridLayers(
            listed=("layers_block_type", "layer_types"),
            names={
                "attention": "attention",
                "full_attention": "attention",
                "mamba": "recurrent",
                "linear_attention": "recurrent",
                "mlp": "dense",
                "moe": "sparse",
            },
            pattern="hybrid_override_pattern",
            letters={"M": "recurrent", "*": "attention", "-": "dense", "E": "sparse"},
            alone=True,
        ),
        recurrent=Mamba2Keys(
            name="mixer",
            heads="mamba_num_heads",
            head_dim="mamba_head_dim",
            groups="n_groups",
            state_size="ssm_state_size",
            width="conv_kernel",
            expand="",
            conv_bias="use_conv_bias",
            in_bias="use_bias",
            out_bias="use_bias",
            limits="",
            # As transformers has it; the authors' own code has no such limit.
            low="time_step_min",
        ),
        experts=_EXPERTS,
        activation="ungated_relu2",
        biases=Biases(mlp="mlp_bias"),
        positions=Positions(rotated_layers="none"),
        norms=Norms(
            names=NormNames(before_attention="norm", before_feed="norm"), float32=True
        ),
        stored=StoredNames(
            feed_forward="mixer",
            skipped=("mtp.",),
            renamings=tuple(Renaming(*pair) for pair in _RENAMINGS.items()),
        ),
        aliases={"layer_norm_epsilon": "rms_norm_eps", "mlp_hidden_act": "hidden_act"},
    ),
)

"""Which fields of a config.json change nothing, and which are refused by name.

A field belongs to one of three kinds:

    read       the readers of layers, ropes and windows take it, or refuse its value
    `INERT`    no value of it changes the logits: tests change each in transformers
    `NEUTRAL`  minfer does not compute what it asks for: refused by its name, unless its
               value asks for nothing

The rule for a field that the family's class in transformers does not have: transformers
ignores it, and so does minfer, unless its name is in `NEUTRAL`, as it then changes the
logits of some other model and was probably meant to; `UNREAD` has such fields that a
class has and ignores. Null counts as absent. A model that is refused here may still run
as transformers' own (fallback/), which computes what its class reads.
"""

from collections.abc import Mapping
from typing import Any, Final

from minfer.effects.models.config_reader import ConfigReader
from minfer.effects.models.families.family import Family

# Fields with the values that ask for nothing, in all families.
NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    # caps and factors of logits, scores and the residual stream (Gemma 2, Granite,
    # Cohere, MiniCPM)
    "final_logit_softcapping": (),
    "attn_logit_softcapping": (),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "attention_multiplier": (),
    "scale_emb": (1,),
    "scale_depth": (),
    # masks (Gemma's embedding models, Llama 4, DeepSeek-V3.2)
    "use_bidirectional_attention": (False,),
    "attention_chunk_size": (),
    "index_topk": (),
    "num_kv_shared_layers": (0,),
    "per_layer_config": ({},),
    # positions (SmolLM 3, MPT, Falcon)
    "no_rope_layers": ([],),
    "no_rope_layer_interval": (0,),
    "alibi": (False,),
    "use_alibi": (False,),
    # blocks (GPT-NeoX, Falcon, OLMo)
    "use_parallel_residual": (False,),
    "parallel_attn": (False,),
    "clip_qkv": (),
    # recurrent layers (Nemotron-H)
    "mamba_hidden_act": ("silu",),
    # feed-forwards: activation of gpt-oss, every how many layers have experts, and the
    # zero experts of LongCat
    "swiglu_alpha": (1.702,),
    "swiglu_limit": (7,),
    "moe_layer_freq": (1,),
    "zero_expert_num": (0,),
}
# The same of one family, by its `model_type`: what other families read.
_GATES: Final = {"attn_output_gate": (True,), "output_gate_type": ("swish", "silu")}
NEUTRAL_OF: Final[Mapping[str, Mapping[str, tuple[Any, ...]]]] = {
    "deepseek_v2": {
        "topk_method": ("greedy", "group_limited_greedy"),
        "rope_interleave": (True,),
    },
    "deepseek_v3": {"topk_method": ("noaux_tc",)},
    # Names of other fields in old configs, and what transformers does not tie.
    "nemotron_h": {
        "mamba_d_conv": (),
        "mamba_n_groups": (),
        "mamba_conv_bias": (),
        "mamba_dt_min": (),
        "tie_word_embeddings": (False,),
    },
    # As published: transformers' class computes this whatever they say, and does not tie.
    "kimi_linear": {
        "mla_use_nope": (True,),
        "moe_router_activation_func": ("sigmoid",),
        "use_grouped_topk": (True,),
        "topk_method": ("noaux_tc",),
        # Of Kimi K3: experts of a width of their own.
        "routed_expert_hidden_size": (),
        "latent_moe_use_norm": (False,),
        "tie_word_embeddings": (False,),
    },
    # As published: transformers' class rotates with "rope", and has no other norms.
    "granitemoehybrid": {
        "position_embedding_type": ("nope", "rope"),
        "normalization_function": ("rmsnorm",),
    },
    # As published: all layers have an attention and a feed-forward.
    "falcon_h1": {"mamba_use_mlp": (True,), "attn_layer_indices": ()},
    # Of old configs.
    "jamba": {"mamba_inner_layernorms": (True,)},
    # Gates that transformers has in any case.
    "qwen3_next": _GATES,
    "qwen3_5_text": _GATES,
    "qwen3_5_moe_text": _GATES,
    # Of layers with a window, which these classes do not read.
    "gemma2": {"sliding_window_pattern": (2,)},
    "gpt_oss": {"sliding_window_pattern": (2,)},
    "olmo3": {"sliding_window_pattern": (4,)},
    "gemma3n_text": {"sliding_window_pattern": (5,)},
    # Text attends to what is before it alone under "vision".
    "gemma4_text": {
        "sliding_window_pattern": (6,),
        "use_bidirectional_attention": ("vision",),
        "rope_scaling": (),
    },
    "glm4_moe_lite": {"topk_method": ("noaux_tc",)},
    "glm4_moe": {"topk_method": ("noaux_tc",)},
    # Text halves, whose classes do this whatever the field of the family says.
    "glm4v_text": {"attention_bias": (True,)},
    "glm4v_moe_text": {"topk_method": ("noaux_tc",), "use_qk_norm": (False,)},
    "qwen3_vl_moe_text": {"norm_topk_prob": (True,)},
    "phi": {"qk_layernorm": (False,)},
    # n_embed is an older name of hidden_size; transformers cannot set head_dim.
    "falcon": {"num_ln_in_parallel_attn": (1, 2), "n_embed": (), "head_dim": ()},
    "mistral4": {"topk_method": ()},
    "dots1": {"topk_method": ("noaux_tc",)},
    "solar_open": {"topk_method": ("noaux_tc",)},
    # As published; transformers' class reads none of them.
    "mimo_v2_flash": {
        "sliding_window_pattern": (6,),
        "topk_method": ("noaux_tc",),
        "attention_chunk_size": (128,),
        "moe_layer_freq": ([0, *[1] * 47],),
        "first_k_dense_replace": (1,),
        "layernorm_epsilon": (1e-5,),
        "swa_num_key_value_heads": (8,),
    },
    "laguna": {
        "moe_apply_router_weight_on_input": (False,),
        # transformers' class reads mlp_layer_types alone, and assumes this
        "mlp_only_layers": ([0],),
        # its ropes are in rope_parameters alone
        "rope_scaling": (),
    },
    # keys of a layer that others share
    "hunyuan_v1_dense": {"use_cla": (False,)},
    "hunyuan_v1_moe": {"use_cla": (False,)},
}
# Fields of transformers' classes, by `model_type`, that their forwards do not read.
UNREAD: Final[Mapping[str, frozenset[str]]] = {
    "gemma3_text": frozenset({"attn_logit_softcapping"}),
}
_TRAINING: Final = (
    "attention_dropout hidden_dropout embd_pdrop resid_pdrop residual_dropout "
    "embedding_dropout "
    "initializer_range router_jitter_noise router_aux_loss_coef "
    "aux_loss_alpha seq_aux pretraining_tp ep_size moe_router_topk_scaling_factor"
)
_OUTPUTS: Final = "output_attentions output_hidden_states output_router_logits use_cache"
_NAMES: Final = (
    "architectures model_type transformers_version auto_map _name_or_path "
    "bos_token_id pad_token_id eos_token_id eod_token_id sep_token_id "
    "initial_context_length cache_implementation "
    "boi_token_index eoi_token_index image_token_index mm_tokens_per_image "
    "vision_config experts_per_token return_dict problem_type id2label label2id "
    "for_llm_compressor chunk_size_feed_forward is_encoder_decoder "
    "_sliding_window_pattern"
)
# Fields that do not change the logits of any family.
INERT: Final = frozenset(f"{_TRAINING} {_OUTPUTS} {_NAMES}".split())
# There, others than MLA's own sizes are of no model that transformers runs.
_MLA: Final = frozenset({"head_dim", "qk_head_dim", "num_key_value_heads"})
_JAMBA: Final = (
    "use_mamba_kernels use_mambapy use_associative_scan num_logits_to_keep "
    "calc_logits_for_entire_prompt"
)
_NEMOTRON: Final = (
    "chunk_size num_logits_to_keep use_mamba_kernels mamba_ssm_cache_dtype expand "
    "time_step_max time_step_limit time_step_floor mamba_proj_bias attention_bias "
    "n_shared_experts moe_shared_expert_overlap mtp_layers_block_type residual_in_fp32 "
    "rescale_prenorm_residual"
)
# Fields that other families read, by the `model_type` of those that do not.
INERT_OF: Final[Mapping[str, frozenset[str]]] = {
    "deepseek_v2": _MLA | {"norm_topk_prob"},
    "deepseek_v3": _MLA,
    "glm4_moe_lite": _MLA,
    "mistral4": _MLA,
    "youtu": _MLA | {"embedding_initializer_range"},
    "kimi_linear": _MLA,
    # Of the algorithm of sums, and of which logits are computed.
    "jamba": frozenset(_JAMBA.split()),
    "gpt_oss": frozenset({"hidden_act"}),
    "gemma3n_text": frozenset({"altup_coef_clip"}),  # of training
    # Of the algorithm of sums, and of which logits are computed.
    "granitemoehybrid": frozenset({"mamba_chunk_size"}),
    "falcon_h1": frozenset({"mamba_chunk_size", "num_logits_to_keep"}),
    # Of initial weights, kernels and of layers that predict further tokens, too.
    "nemotron_h": frozenset(_NEMOTRON.split()),
}


def check_fields(reader: ConfigReader, family: Family) -> None:
    """Refuse fields that would change the logits in a way that minfer does not compute.
    Raises `UnsupportedModelError`.
    """
    neutral = {**NEUTRAL, **NEUTRAL_OF.get(family.model_type, {})}
    own = NEUTRAL_OF.get(family.model_type, {}).keys()
    unread = neutral.keys() - (fields_read(family) - own)
    for key in sorted(unread & reader.config.keys()):
        refuse_field(reader, key, neutral[key])


def fields_read(family: Family) -> set[str]:
    """Returns the fields of `NEUTRAL` that the family's row names as fields of its
    configs.
    """
    fields = {
        family.factors.embedding,
        family.factors.residual,
        family.scores.multiplier,
        family.factors.logits,
        family.factors.logit_divisor,
        family.factors.logit_cap,
        family.scores.cap,
    }
    fields |= {*family.aliases}.union(*(variant.when for variant in family.variants))
    if family.windows.where == "chunked":
        fields.add("attention_chunk_size")
    fields |= {family.extras.shared_keys}
    if family.heads.full is not None:
        fields |= {"per_layer_config"}
    if family.positions.rotated_layers == "listed":
        fields |= {"no_rope_layers", "no_rope_layer_interval"}
    return fields & NEUTRAL.keys()


def refuse_field(reader: ConfigReader, key: str, neutral: tuple[Any, ...]) -> None:
    """Refuse a field unless it is absent or has a value that asks for nothing. Raises
    `UnsupportedModelError`.
    """
    value = reader.config[key]
    if value is None or any(value == neutral_value for neutral_value in neutral):
        return
    alternatives = " or ".join(repr(accepted) for accepted in (None, *neutral))
    raise reader.refusal(f"{key} {value!r} is not supported; {alternatives} is")

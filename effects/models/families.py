"""The family table: how models of one architecture differ from others.

All are decoders with RMSNorm and rotary embedding. A family is a row, not a class.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal

from attrs import evolve, frozen

from minfer.effects.models.parts import Renaming
from minfer.kernels.leaves import Activation


@frozen(kw_only=True)
class ExpertKeys:
    """How the configs of a family name what its experts are, and its checkpoints their
    tensors.
    """

    count: tuple[str, ...]  # keys of the number of experts, the first that is there
    inter: str = "moe_intermediate_size"  # of an expert's width
    scores: Literal["softmax", "sigmoid"] = "softmax"
    # Whether weights sum to 1, or the key of a flag that says so.
    normalise: bool | str = "norm_topk_prob"
    correction: bool = False  # scores are corrected before experts are chosen
    float32: bool = False  # the router's logits are computed in float32
    shared: str = ""  # the key of the width of shared experts
    shared_count: str = ""  # or of their number, each as wide as an expert
    shared_gate: bool = False  # a gate weighs the shared experts
    first_dense: str = ""  # the key of the number of first layers that are dense
    layer_types: str = ""  # or, with priority, of a list of "dense" and "sparse"
    bias: bool = False  # router and experts have biases
    router: str = "mlp.gate"  # tensors in a layer of a checkpoint
    experts: str = "mlp.experts"
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared_experts: str = "mlp.shared_experts"
    # Stacked tensors are [experts, in, out], and gates alternate with ups.
    transposed: bool = False


@frozen
class Family:
    """One row of the family table; see `layers.py` for the types of its layers."""

    architecture: str
    model_type: str
    defaults: Mapping[str, Any]  # config values that transformers assumes when absent
    # Where sliding windows are: in no layer, in every layer if there is a
    # `sliding_window`, or, with `use_sliding_window`, in the layers from
    # `max_window_layers` on, in each second of the others, or (`pattern`) in all but each
    # `sliding_window_pattern`-th one. `layer_types` has priority, but for `uniform`: in
    # every layer, and layers of several types are refused.
    windows: Literal["none", "every", "uniform", "upper", "lower", "flag", "pattern"] = (
        "none"
    )
    # Whether queries, keys and values have biases, or the key of a flag that says so.
    qkv_bias: bool | str = False
    out_bias: str = ""  # the flag of a bias of the product after attention
    mlp_bias: str = ""  # and of dense feed-forwards
    # Each query and key head is normalised before it is rotated; or a flag that says so.
    qk_norm: bool | str = False
    attention: Literal["gqa", "mla"] = "gqa"
    experts: ExpertKeys | None = None  # None: all layers are dense
    activation: Activation = "silu"
    sinks: bool = False  # a logit of each head that takes part in the softmax (gpt-oss)
    norm_offset: bool = False  # checkpoints store norms' factors less 1 (Gemma)
    norm_after: bool = False  # results of sublayers are normalised before they are added
    embedding_scale: bool = False  # embeddings times the root of their size (Gemma)
    # The config's value whose root divides scores; empty: a head's dimensions.
    score_scale: str = ""
    ropes_by_kind: bool = False  # layers with and without windows have their own
    partial_rotary: bool = False  # a part of a head's dimensions may turn
    prefixes: tuple[str, ...] = ()  # further ones of tensors' names in checkpoints
    renamings: tuple[Renaming, ...] = ()


_QWEN: Final = {"max_position_embeddings": 32768, "num_key_value_heads": 32}
_QWEN2: Final = _QWEN | {"sliding_window": 4096, "max_window_layers": 28}
_QWEN3: Final = _QWEN2 | {"head_dim": 128}
_LLAMA: Final = {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2}
_LONG: Final = {"max_position_embeddings": 131072, "num_key_value_heads": 8}
_MISTRAL: Final = _LLAMA | _LONG | {"sliding_window": 4096}
_BIAS: Final = "attention_bias"
_SPARSE: Final = {"decoder_sparse_step": 1, "mlp_only_layers": []}
_QWEN_EXPERTS: Final = ExpertKeys(count=("num_experts", "num_local_experts"))
_DEEPSEEK: Final = ExpertKeys(
    count=("num_experts", "n_routed_experts"),
    shared_count="n_shared_experts",
    first_dense="first_k_dense_replace",
    normalise=False,
    float32=True,
)
_SIGMOID: Final = ExpertKeys(
    count=("num_local_experts", "n_routed_experts"),
    shared_count="n_shared_experts",
    first_dense="first_k_dense_replace",
    scores="sigmoid",
    correction=True,
    float32=True,
)
_MLA: Final = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_YARN: Final = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_ROWS: Final = (
    Family("Qwen2ForCausalLM", "qwen2", _QWEN2, "upper", True),
    Family("Qwen3ForCausalLM", "qwen3", _QWEN3, "upper", _BIAS, _BIAS, qk_norm=True),
    Family("LlamaForCausalLM", "llama", _LLAMA, "none", _BIAS, _BIAS, "mlp_bias"),
    Family("MistralForCausalLM", "mistral", _MISTRAL, "every"),
    # Ministral 8B is published as `mistral` with `layer_types`.
    Family("MinistralForCausalLM", "ministral", _MISTRAL, "every"),
    Family(
        "MixtralForCausalLM",
        "mixtral",
        {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 2,
            "rope_theta": 1e6,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
        },
        "uniform",
        experts=ExpertKeys(
            count=("num_experts", "num_local_experts"),
            inter="intermediate_size",
            normalise=True,
            router="block_sparse_moe.gate",
            experts="block_sparse_moe.experts",
            matrices=("w1", "w3", "w2"),
        ),
        renamings=(Renaming(r"\.mlp\.", ".block_sparse_moe."),),  # of transformers 5
    ),
    Family(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        _SPARSE
        | {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 16,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts_per_tok": 4,
            "num_experts": 60,
            "qkv_bias": True,
        },
        "lower",
        "qkv_bias",
        experts=ExpertKeys(
            count=("num_experts",),
            shared="shared_expert_intermediate_size",
            shared_gate=True,
            shared_experts="mlp.shared_expert",
        ),
    ),
    Family(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        _SPARSE
        | {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_local_experts": 128,
        },
        "flag",
        _BIAS,
        _BIAS,
        qk_norm=True,
        experts=_QWEN_EXPERTS,
    ),
    Family(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
        qkv_bias=_BIAS,
        qk_norm="use_qk_norm",
        partial_rotary=True,
        experts=_SIGMOID,
    ),
    Family(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        _MLA
        | {
            "max_position_embeddings": 2048,
            "eos_token_id": 2,
            "moe_intermediate_size": 1407,
            "n_shared_experts": 2,
            "n_routed_experts": 64,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 0,
            "topk_method": "greedy",
        },
        qkv_bias=_BIAS,
        out_bias=_BIAS,
        mlp_bias="mlp_bias",
        attention="mla",
        experts=_DEEPSEEK,
    ),
    Family(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        _MLA
        | {
            "max_position_embeddings": 4096,
            "eos_token_id": 1,
            "moe_intermediate_size": 2048,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_routed_experts": 256,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 3,
            "norm_topk_prob": True,
        },
        qkv_bias=_BIAS,
        out_bias=_BIAS,
        attention="mla",
        experts=_SIGMOID,
    ),
    Family(  # GLM-4.7-Flash
        "Glm4MoeLiteForCausalLM",
        "glm4_moe_lite",
        _MLA
        | {
            "max_position_embeddings": 202752,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 1,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "moe_intermediate_size": 1536,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
            "n_routed_experts": 64,
            "routed_scaling_factor": 1.8,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
        qkv_bias=_BIAS,
        out_bias=_BIAS,
        attention="mla",
        experts=evolve(_SIGMOID, layer_types="mlp_layer_types"),
    ),
    Family(
        "YoutuForCausalLM",
        "youtu",
        _MLA
        | {
            "max_position_embeddings": 131072,
            "eos_token_id": 128001,
            "q_lora_rank": 1536,
            "tie_word_embeddings": True,
        },
        qkv_bias=_BIAS,
        out_bias=_BIAS,
        attention="mla",
    ),
    Family(
        "GptOssForCausalLM",
        "gpt_oss",
        {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "num_experts_per_tok": 4,
            "num_local_experts": 128,
            "attention_bias": True,
            "rope_theta": 150000.0,
            "rope_parameters": _YARN,
        },
        "pattern",
        _BIAS,
        _BIAS,
        sinks=True,
        experts=ExpertKeys(
            count=("num_experts", "num_local_experts"),
            inter="intermediate_size",
            normalise=True,
            bias=True,
            router="mlp.router",
            transposed=True,
        ),
        activation="clamped",
    ),
    Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        {
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "tie_word_embeddings": True,
            "eos_token_id": 1,
        },
        "pattern",
        _BIAS,
        _BIAS,
        qk_norm=True,
        activation="gelu_tanh",
        norm_offset=True,
        norm_after=True,
        embedding_scale=True,
        score_scale="query_pre_attn_scalar",
        ropes_by_kind=True,
        prefixes=("language_model.",),
    ),
)
FAMILIES: Final[Mapping[str, Family]] = {row.architecture: row for row in _ROWS}
BY_MODEL_TYPE: Final[Mapping[str, Family]] = {row.model_type: row for row in _ROWS}

"""The family table: how models of one architecture differ from others.

All are decoders with rotary embedding. A family is a row, not a class.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from attrs import frozen

from minfer.effects.models.parts import Renaming
from minfer.kernels.leaves import Activation, GateActivation

QkNormFactors = Literal["shared", "stacked", "listed"]


@frozen(kw_only=True)
class NormsBeside:
    """Names of norms in a layer of a checkpoint whose experts are beside a dense
    feed-forward (Gemma 4): that of the experts' input, and those of the results of both,
    before they are added.
    """

    experts: str
    dense_result: str
    experts_result: str


@frozen(kw_only=True)
class ExpertKeys:
    """How the configs of a family name what its experts are, and its checkpoints their
    tensors.
    """

    count: tuple[str, ...]  # keys of the number of experts, the first that is there
    inter: str = "moe_intermediate_size"  # of an expert's width
    # And of how many experts a token goes through.
    top_k: tuple[str, ...] = ("num_experts_per_tok",)
    top_k_by_layer: bool = False  # which may be a list, of a number for each layer
    scores: Literal["softmax", "sigmoid"] = "softmax"
    # Whether weights sum to 1, or the key of a flag that says so.
    normalise: bool | str = "norm_topk_prob"
    # The tensor of a layer that corrects scores before experts are chosen; empty: they
    # are not corrected.
    correction: str = ""
    correction_rows: bool = False  # it is [1, experts] there
    min_sum: str = ""  # the key of the least sum that weights are divided by
    logit_cap: str = ""  # the key of a cap of the router's logits
    groups: bool = False  # n_group and topk_group limit the choice
    scaling: str = "routed_scaling_factor"  # the key of a factor of weights
    float32: bool = False  # the router's logits are computed in float32
    shared: str = ""  # the key of the width of shared experts
    shared_count: str = ""  # or of their number, each as wide as an expert
    shared_gate: bool = False  # a gate weighs the shared experts
    first_dense: str = ""  # the key of the number of first layers that are dense
    layer_types: str = ""  # or, with priority, of a list of "dense" and "sparse"
    # The key of how often a layer is sparse, and, with priority, of a list of them.
    sparse_step: str = "decoder_sparse_step"
    sparse_layers: str = ""
    weighs_inputs: bool = False  # weights multiply what experts get (Llama 4)
    # moe_layer_start_index, moe_layer_end_index and moe_layer_interval say which layers
    # are sparse (Ernie).
    layer_range: bool = False
    bias: bool = False  # router and experts have biases
    router: str = "mlp.gate"  # tensors in a layer of a checkpoint
    experts: str = "mlp.experts"
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared_experts: str = "mlp.shared_experts"
    # Names of the two stacked tensors in a layer, of a family whose checkpoints have no
    # others; and of a shared expert's gate and up, stored as one, and its down.
    stacks: tuple[str, ...] = ()
    shared_matrices: tuple[str, str] = ("", "down_proj")
    # Published checkpoints have the matrices of all experts as one tensor.
    stacked: bool = False
    transposed: bool = False  # stacked tensors are [experts, in, out]
    alternating: bool = False  # and gates alternate with ups in them
    # Groups of experts are ranked by their best two scores; with a correction they always
    # are.
    best_two: bool = False
    enabled: str = ""  # the flag without which all layers are dense
    beside: "NormsBeside | None" = None  # experts are beside a dense feed-forward
    # Stacked tensors are [experts, in, out] in some checkpoints, as their shapes show.
    maybe_transposed: bool = False


@frozen(kw_only=True)
class NormNames:
    """Names of the norms of a layer in a checkpoint, of each sublayer's input and of its
    result, before it is added to the residual stream; empty: there is no such norm.
    """

    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_feed: str = "post_attention_layernorm"
    after_feed: str = ""


@frozen(kw_only=True)
class RopeBases:
    """The bases of layers without and with windows, where a config has none."""

    full: float
    sliding: float
    sliding_key: str = ""  # of the latter in a config
    own_shares: bool = False  # and shares of dimensions that turn (Laguna)


@frozen(kw_only=True)
class Variant:
    """What differs for configs that have these values, null being absent: values of the
    row, and values of the config that follow from them.
    """

    when: Mapping[str, Any]
    row: Mapping[str, Any] = MappingProxyType({})
    config: Mapping[str, Any] = MappingProxyType({})
    refusal: str = ""  # why such configs are refused


@frozen(kw_only=True)
class FullHeads:
    """Keys of sizes that layers without a window have for themselves (Gemma 4)."""

    head_dim: str
    kv_heads: str  # in use if keys are values
    keys_are_values: str  # the flag


@frozen
class HeadGateKeys:
    """Gates of what attention returns."""

    name: str  # of the matrix in a layer of a checkpoint
    activation: GateActivation
    # The key of whether there is one of each head (true, "per-head") or of each of its
    # dimensions ("per-element"); empty: of each dimension.
    granularity: str = ""


@frozen
class Family:
    """One row of the family table; see `layers.py` for the types of its layers."""

    architecture: str
    model_type: str
    defaults: Mapping[str, Any]  # config values that transformers assumes when absent
    # Where sliding windows are: in no layer, in every layer if there is a
    # `sliding_window`, or, with `use_sliding_window`, in the layers from
    # `max_window_layers` on, in each second of the others, or (`pattern`) in all but each
    # `sliding_window_pattern`-th one, or (`unrotated`) in those whose heads are not
    # rotated; or (`chunked`) none, but those whose heads are rotated attend within chunks
    # of `attention_chunk_size` positions, or (`above`) from `max_window_layers` on,
    # whatever a flag says, or (`listed`) only where `layer_types` says so. `layer_types`
    # has priority, but for `uniform`: in every layer, and layers of several types are
    # refused.
    windows: Literal[
        "none",
        "every",
        "uniform",
        "upper",
        "lower",
        "flag",
        "pattern",
        "unrotated",
        "chunked",
        "above",
        "listed",
    ] = "none"
    # Whether queries, keys and values have biases, or the key of a flag that says so.
    qkv_bias: bool | str = False
    out_bias: bool | str = ""  # the flag of a bias of the product after attention
    mlp_bias: bool | str = ""  # and of dense feed-forwards
    head_bias: bool | str = ""  # and of the output head
    # Each query and key head is normalised before it is rotated; or a flag that says so.
    qk_norm: bool | str = False
    # Or all heads together; or after the rotation.
    qk_norm_over: Literal["head", "all"] = "head"
    qk_norm_after_rope: bool = False
    # Whether each head has factors of its own for it: a checkpoint has one tensor of them
    # all, or one of each head, by its number.
    qk_norm_factors: QkNormFactors = "shared"
    # The flag of a norm of rotated heads without factors, after the rotation (Llama 4).
    unit_heads: str = ""
    qk_norm_names: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    attention: Literal["gqa", "mla"] = "gqa"
    experts: ExpertKeys | None = None  # None: all layers are dense
    # The key of the width of dense feed-forwards, and how the names of tensors of
    # feed-forwards begin in a layer of a checkpoint.
    dense_width: str = "intermediate_size"
    feed_name: str = "mlp"
    activation: Activation = "silu"
    # The feed-forward's width in that of the residual stream, where no config value says
    # it; 0: one has to.
    default_feed_ratio: int = 0
    score_cap: str = ""  # the key of the cap of attention scores (Gemma 2)
    logit_cap: str = ""  # and of logits
    # A logit of each head that takes part in the softmax (gpt-oss), in layers with a
    # window alone (MiMo).
    sinks: bool | Literal["windowed"] = False
    sinks_name: str = "sinks"  # the tensor's in a checkpoint
    # Key heads of layers with a window, as a multiple of the others' (MiMo).
    window_kv_heads: int = 1
    value_dim: str = ""  # the key of a value's width; empty: it is that of keys
    value_scale: str = ""  # the key of a factor of values
    first_full: bool = False  # the first layer has no window, whatever the pattern
    # How names of tensors begin that are of other parts, such as those that predict
    # further tokens.
    skipped: tuple[str, ...] = ()
    full_heads: FullHeads | None = None
    value_norm: bool = False  # values are normalised, without factors
    # The key of the number of last layers that read keys and values of other layers, and
    # of a flag that makes their feed-forwards twice as wide.
    shared_layers: str = ""
    shared_wide: str = ""
    scaled_scores: bool = True  # False: scores are not divided by anything
    last_full: bool = False  # the last layer has no window, whatever a config lists
    # The key of the width of what each layer gets of a token's embedding, and whether
    # layers multiply their result with a number.
    layer_inputs: str = ""
    layer_scalars: bool = False
    norm_float32: bool = False  # products with norms' factors are in float32
    norm_offset: bool = False  # checkpoints store norms' factors less 1 (Gemma)
    norm_names: NormNames = NormNames()
    layer_norm: bool = False  # norms are LayerNorm, not RMSNorm
    norm_bias: bool = False  # and those of sublayers, and the last one, have biases
    # Attention and feed-forward read the same residual stream; without a norm of its own,
    # the feed-forward reads what attention reads.
    parallel: bool = False
    embedding_scale: bool = False  # embeddings times the root of their size (Gemma)
    # Keys of factors, and of what divides logits; empty: there is none (Granite).
    embedding_multiplier: str = ""
    residual_multiplier: str = ""  # of what each sublayer adds to the residual stream
    score_multiplier: str = ""  # of scores, instead of the root that divides them
    logit_multiplier: str = ""
    logit_divisor: str = ""
    # The config's value whose root divides scores; empty: a head's dimensions.
    score_scale: str = ""
    # Where factors of queries by position stand: in the object about rotation (Mistral),
    # or in the config, of layers that are not rotated (Llama 4).
    query_scale: Literal["none", "rope", "unrotated"] = "none"
    heads_by_layer: str = ""  # the key of a list of the query heads of each layer
    head_gate: HeadGateKeys | None = None
    # Layers with and without windows have ropes of their own.
    rope_bases: RopeBases | None = None
    partial_rotary: bool = False  # a part of a head's dimensions may turn
    rotary_dim: str = ""  # the key of their number, where no share is given
    ntk_alpha: bool = False  # rotation of type dynamic may have a fixed alpha (Hunyuan)
    longrope: bool = False  # the only scaling of ropes, whatever its name (Phi-3)
    # The layers whose heads are rotated: all, those with a window, or those that
    # `no_rope_layers` lists with 1 (default: all but each `no_rope_layer_interval`-th).
    rotated_layers: Literal["all", "listed", "windowed"] = "all"
    interleaved_rotary: bool = False  # neighbours turn together, not halves of a head
    # Names of queries, keys and values, and of gate and up, in checkpoints that store
    # each of them as one matrix; and whether each key head is there behind its queries,
    # before its values.
    stored_qkv: str = ""
    stored_gate_up: str = ""
    qkv_by_key_head: bool = False
    eos_ids: tuple[int, ...] = ()  # where a config has none, or null
    # Positions may have three sections, of images and video (M-RoPE of Qwen-VL, GLM-V):
    # those of text are equal, so that they are positions.
    position_sections: bool = False
    renamings: tuple[Renaming, ...] = ()
    # The family's own names of config values, and those of most families.
    aliases: Mapping[str, str] = MappingProxyType({})
    variants: tuple[Variant, ...] = ()  # all that hold, one after the other
    class_aliases: tuple[str, ...] = ()  # other names of the architecture in configs

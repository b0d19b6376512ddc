"""The family table: how models of one architecture differ from others.

All are decoders with RMSNorm and rotary embedding. A family is a row, not a class.
"""

from collections.abc import Mapping
from typing import Any, Literal

from attrs import frozen

from minfer.effects.models.parts import Renaming
from minfer.kernels.leaves import Activation, GateActivation


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
    # Stacked tensors are [experts, in, out], and gates alternate with ups.
    transposed: bool = False


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
    # rotated, or (`above`) from `max_window_layers` on, whatever a flag says, or
    # (`listed`) only where `layer_types` says so. `layer_types` has priority, but for
    # `uniform`: in every layer, and layers of several types are refused.
    windows: Literal[
        "none",
        "every",
        "uniform",
        "upper",
        "lower",
        "flag",
        "pattern",
        "unrotated",
        "above",
        "listed",
    ] = "none"
    # Whether queries, keys and values have biases, or the key of a flag that says so.
    qkv_bias: bool | str = False
    out_bias: str = ""  # the flag of a bias of the product after attention
    mlp_bias: str = ""  # and of dense feed-forwards
    head_bias: str = ""  # and of the output head
    # Each query and key head is normalised before it is rotated; or a flag that says so.
    qk_norm: bool | str = False
    # Or all heads together; or after the rotation.
    qk_norm_over: Literal["head", "all"] = "head"
    qk_norm_after_rope: bool = False
    qk_norm_names: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    attention: Literal["gqa", "mla"] = "gqa"
    experts: ExpertKeys | None = None  # None: all layers are dense
    activation: Activation = "silu"
    sinks: bool = False  # a logit of each head that takes part in the softmax (gpt-oss)
    norm_offset: bool = False  # checkpoints store norms' factors less 1 (Gemma)
    norm_names: NormNames = NormNames()
    embedding_scale: bool = False  # embeddings times the root of their size (Gemma)
    # Keys of factors, and of what divides logits; empty: there is none (Granite).
    embedding_multiplier: str = ""
    residual_multiplier: str = ""  # of what each sublayer adds to the residual stream
    score_multiplier: str = ""  # of scores, instead of the root that divides them
    logit_multiplier: str = ""
    logit_divisor: str = ""
    # The config's value whose root divides scores; empty: a head's dimensions.
    score_scale: str = ""
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
    # each of them as one matrix.
    stored_qkv: str = ""
    stored_gate_up: str = ""
    eos_ids: tuple[int, ...] = ()  # where a config has none, or null
    prefixes: tuple[str, ...] = ()  # further ones of tensors' names in checkpoints
    # How names of tensors begin that are of other parts, such as those that predict
    # further tokens.
    skipped: tuple[str, ...] = ()
    renamings: tuple[Renaming, ...] = ()
    aliases: tuple[str, ...] = ()  # other names of the architecture in configs

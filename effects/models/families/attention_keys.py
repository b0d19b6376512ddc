"""What the rows of the family table say of attention; see family.py."""

from typing import Literal

from attrs import frozen

from minfer.kernels.leaves import GateActivation

QkNormFactors = Literal["shared", "stacked", "listed"]


@frozen(kw_only=True)
class Biases:
    """Which products have biases."""

    qkv: bool | str = False  # those of queries, keys and values
    out: bool | str = ""  # that after attention
    mlp: bool | str = ""  # those of dense feed-forwards
    lm_head: bool | str = ""


@frozen(kw_only=True)
class QkNorm:
    """The norms of queries and keys."""

    present: bool | str = False
    # Each head is normalised by itself, or all heads together (OLMo 2).
    over: Literal["head", "all"] = "head"
    after_rope: bool = False  # after the rotation, not before (Hunyuan)
    # Whether each head has factors of its own: a checkpoint has one tensor of them all
    # (stacked), or one of each head, by its number (listed).
    factors: QkNormFactors = "shared"
    names: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")  # of tensors
    # The flag of another norm, of rotated heads, without factors (Llama 4).
    unit: str = ""


@frozen(kw_only=True)
class HeadGateKeys:
    """Gates of what attention returns."""

    # Of the matrix in a layer of a checkpoint; empty: each head has them behind its
    # query, in the matrix of queries (Qwen3-Next).
    name: str
    activation: GateActivation
    # The key of whether there is one of each head (true, "per-head") or of each of its
    # dimensions ("per-element"); empty: of each dimension.
    granularity: str = ""


@frozen(kw_only=True)
class FullHeads:
    """Keys of sizes that layers without a window have for themselves (Gemma 4)."""

    head_dim: str
    kv_heads: str  # in use if keys are values
    keys_are_values: str  # the flag


@frozen(kw_only=True)
class HeadKeys:
    """Number and width of heads, where these are not the same everywhere, and what is
    done with values and results.
    """

    by_layer: str = ""  # the key of a list of the query heads of each layer
    full: FullHeads | None = None
    # Key heads of layers with a window, as a multiple of the others' (MiMo).
    window_kv_multiple: int = 1
    value_dim: str = ""  # the key of a value's width; empty: it is that of keys
    value_scale: str = ""  # the key of a factor of values
    value_norm: bool = False  # values are normalised, without factors
    gate: HeadGateKeys | None = None


@frozen(kw_only=True)
class Scores:
    """Attention scores: what multiplies or divides them, and what caps them."""

    scaled: bool = True  # False: they are not divided by anything
    root_of: str = ""  # divided by the root of this value; empty: of a head's dimensions
    multiplier: str = ""  # the key of a factor instead of that (Granite)
    cap: str = ""  # the key of a cap, by tanh (Gemma 2)
    # A logit of each head that takes part in the softmax (gpt-oss), in layers with a
    # window alone (MiMo).
    sinks: bool | Literal["windowed"] = False
    sinks_name: str = "sinks"  # the tensor's in a checkpoint


@frozen(kw_only=True)
class RopeBases:
    """The bases of layers without and with windows, where a config has none."""

    full: float
    sliding: float
    sliding_key: str = ""  # of the latter in a config
    own_shares: bool = False  # and shares of dimensions that turn (Laguna)


@frozen(kw_only=True)
class Positions:
    """Rotary embedding, and what else depends on positions."""

    # The layers whose heads are rotated: all, none, those with a window, or those that
    # `no_rope_layers` lists with 1 (default: all but each `no_rope_layer_interval`-th).
    rotated_layers: Literal["all", "none", "listed", "windowed"] = "all"
    # Layers with and without windows have ropes of their own.
    bases: RopeBases | None = None
    partial: bool = False  # a part of a head's dimensions may turn
    rotary_dim: str = ""  # the key of their number, where no share is given
    interleaved: bool = False  # neighbours turn together, not halves of a head
    ntk_alpha: bool = False  # rotation of type dynamic may have a fixed alpha (Hunyuan)
    longrope: bool = False  # the only scaling of ropes, whatever its name (Phi-3)
    # Where factors of queries by position stand: in the object about rotation (Mistral),
    # or in the config, of layers that are not rotated (Llama 4).
    query_scale: Literal["none", "rope", "unrotated"] = "none"
    # Positions may have three sections, of images and video (M-RoPE of Qwen-VL, GLM-V):
    # those of text are equal, so that they are positions.
    sections: bool = False


@frozen(kw_only=True)
class Windows:
    """Which layers have a sliding window, or attend within chunks.

    `where` says it for configs without `layer_types`, which have priority:

    none        no layer has a window
    every       every layer, if there is a `sliding_window`
    uniform     so, too, and `layer_types` of several types are refused
    upper       with `use_sliding_window`, the layers from `max_window_layers` on
    above       so, too, whatever that flag says
    lower       with the flag, each second of the layers before these
    flag        with the flag, every layer, whatever `layer_types` says
    pattern     all but each `sliding_window_pattern`-th layer
    unrotated   those whose heads are not rotated
    listed      none
    chunked     none, but those whose heads are rotated attend within chunks of
                `attention_chunk_size` positions
    """

    where: Literal[
        "none",
        "every",
        "uniform",
        "upper",
        "above",
        "lower",
        "flag",
        "pattern",
        "unrotated",
        "listed",
        "chunked",
    ] = "none"
    first_full: bool = False  # the first layer has no window, whatever the pattern
    last_full: bool = False  # the last layer has no window, whatever a config lists

"""What the rows of the family table say of norms, feed-forwards, the residual stream and
the names of tensors; see family.py.
"""

from attrs import frozen

from minfer.effects.models.parts import Renaming


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
class Norms:
    """The norms of the residual stream and of sublayers' results: of which kind they are,
    and where.
    """

    names: NormNames = NormNames()
    layer_norm: bool = False  # they are LayerNorm, not RMSNorm
    bias: bool = False  # those of sublayers, and the last one, have biases
    offset: bool = False  # checkpoints store their factors less 1 (Gemma)
    float32: bool = False  # products with their factors are in float32


@frozen(kw_only=True)
class FeedForward:
    """The width of dense feed-forwards."""

    width: str = "intermediate_size"  # its key
    first_width: str = ""  # a key that has priority
    # The flag of whether the width is two thirds of it, times `block_ffn_dim_multiplier`,
    # rounded up to a multiple of `block_multiple_of` (LFM2).
    adjusted: str = ""
    # The width as a multiple of the residual stream's, where no config value says it; 0:
    # one has to.
    default_ratio: int = 0
    by_layer: bool = False  # the width may be a list of those of each layer
    # The key of the share of a token's channels that are zero, of each layer (Gemma 3n).
    sparsity: str = ""


@frozen(kw_only=True)
class LayerExtras:
    """What layers have besides an attention and a feed-forward, one after the other."""

    # Both read the same residual stream; without a norm of its own, the feed-forward
    # reads what attention reads.
    parallel: bool = False
    # The key of the width of what each layer gets of a token's embedding (Gemma 3n, 4).
    inputs: str = ""
    fewer_inputs: bool = False  # tokens without one have that of token 0
    # There are several residual streams, and LAuReL beside attention (Gemma 3n).
    altup: bool = False
    scalars: bool = False  # layers multiply their result with a number
    # The key of the number of last layers that read keys and values of other layers, and
    # of a flag that makes their feed-forwards twice as wide.
    shared_keys: str = ""
    shared_wide: str = ""


@frozen(kw_only=True)
class Factors:
    """Keys of what multiplies, divides or caps embeddings, results of sublayers and
    logits.
    """

    embedding: str = ""
    embedding_root: bool = False  # no key: times the root of their size (Gemma)
    residual: str = ""  # of what each sublayer adds to the residual stream
    logits: str = ""
    logit_divisor: str = ""
    logit_cap: str = ""


@frozen(kw_only=True)
class Multipliers:
    """Keys of factors within sublayers (Falcon-H1)."""

    keys: str = ""  # of keys of attention
    attention_input: str = ""
    attention_result: str = ""
    recurrent_input: str = ""
    # Of the outputs of the recurrent sublayer's first product, a list.
    recurrent_outputs: str = ""
    recurrent_result: str = ""
    feed_forward: str = ""  # of gates, before the activation, and of results: a list


@frozen(kw_only=True)
class StoredNames:
    """Names of tensors in checkpoints."""

    # Of queries, keys and values, and of gate and up, where each of these are stored as
    # one matrix; and whether each key head is there behind its queries, before its
    # values.
    qkv: str = ""
    qkv_by_key_head: bool = False
    gate_up: str = ""
    down: str = "down_proj"
    feed_forward: str = "mlp"  # how names of a feed-forward's begin in a layer
    # How names begin of tensors of other parts, such as those that predict further
    # tokens.
    skipped: tuple[str, ...] = ()
    renamings: tuple[Renaming, ...] = ()

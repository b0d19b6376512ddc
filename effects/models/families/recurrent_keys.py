"""What the rows of the family table say of recurrent sublayers; see family.py."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from attrs import frozen

# "dense" and "sparse": a feed-forward alone, in models whose layers have one sublayer.
LayerKind = Literal["attention", "recurrent", "both", "dense", "sparse"]


@frozen(kw_only=True)
class HybridLayers:
    """Which layers have an attention, and which a recurrent sublayer."""

    # Keys of a list of the kinds of layers, the first that is there.
    listed: tuple[str, ...] = ("layer_types",)
    # Kinds by their names there.
    names: Mapping[str, LayerKind] = MappingProxyType(
        {"full_attention": "attention", "linear_attention": "recurrent"}
    )
    # The key of a string instead of a list, and kinds by their letters there.
    pattern: str = ""
    letters: Mapping[str, LayerKind] = MappingProxyType({})
    # Each layer has one sublayer: an attention, a recurrent one, or a feed-forward; and
    # the list, or the string, says how many there are (Nemotron-H).
    alone: bool = False
    # Without a list: the kind of all layers, or the key of how often a layer has an
    # attention, 4 where a config has none; or that of a list of the layers that have one,
    # all of them where there is none.
    every: LayerKind = "recurrent"
    interval: str = ""
    attention: str = ""
    # Or the keys of lists of layers by their kinds, in which the first layer is 1
    # (Kimi-Linear).
    numbered: Mapping[str, LayerKind] = MappingProxyType({})
    # Or the key of how often a layer has an attention, and that of the first of them
    # (Jamba).
    period: str = ""
    offset: str = ""


@frozen(kw_only=True)
class GatedDeltaKeys:
    """Gated delta nets (Qwen3-Next)."""

    # Queries, keys, values and output gates are one matrix in checkpoints, those of each
    # key head together; so are the gates of states. Else queries, keys and values are
    # one, and the others are separate (Qwen3.5).
    by_key_head: bool


@frozen(kw_only=True)
class KimiDeltaKeys:
    """Kimi delta attention (Kimi-Linear)."""


@frozen(kw_only=True)
class MambaKeys:
    """Mamba, the first one, with norms of steps, B and C (Jamba)."""


@frozen(kw_only=True)
class Mamba2Keys:
    """Mamba 2: keys of its sizes, and how its results become those of the layer."""

    name: str = "mamba"  # in a layer of a checkpoint
    heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"  # which may be "auto"
    groups: str = "mamba_n_groups"
    state_size: str = "mamba_d_state"
    width: str = "mamba_d_conv"  # of the convolution
    # The key of how many times as wide as the residual stream all heads are; empty: as
    # wide as they are. And that of their width, which has priority.
    expand: str = "mamba_expand"
    inner: str = ""
    conv_bias: str = "mamba_conv_bias"
    in_bias: str = "mamba_proj_bias"
    out_bias: str = "mamba_proj_bias"
    limits: str = "time_step_limit"  # of steps: the smallest and the largest
    low: str = ""  # or that of the smallest alone
    out_norm: bool | str = True  # results are normalised
    norm_first: str = ""  # the flag of whether they are before the gate


@frozen(kw_only=True)
class ShortConvKeys:
    """Gated short convolutions (LFM2)."""


RecurrentKeys = GatedDeltaKeys | KimiDeltaKeys | MambaKeys | Mamba2Keys | ShortConvKeys

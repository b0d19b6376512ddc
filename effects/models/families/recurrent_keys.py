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
    # Without such a list or string: the kind of all layers but those that the following
    # keys give an attention.
    every: LayerKind = "recurrent"
    # The key of a number N, by default 4: the last of every N layers has an attention.
    interval: str = ""
    # The key of a list of the layers with an attention; without the list, all have one.
    attention: str = ""
    # The keys of lists of layers, in which the first layer is 1, and the kind of the
    # layers in each (Kimi-Linear).
    numbered: Mapping[str, LayerKind] = MappingProxyType({})
    # The keys of a number N and of an offset: from layer `offset` on, every N-th layer
    # has an attention (Jamba).
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
    # The key of the width of all heads together, in hidden sizes; empty: heads times
    # `head_dim`. And the key of that width in elements, which has priority.
    expand: str = "mamba_expand"
    inner: str = ""
    conv_bias: str = "mamba_conv_bias"
    in_bias: str = "mamba_proj_bias"
    out_bias: str = "mamba_proj_bias"
    limits: str = "time_step_limit"  # of steps: the smallest and the largest
    low: str = ""  # or the key of the smallest step alone
    out_norm: bool | str = True  # whether results are normalised, or the key of that flag
    norm_first: str = ""  # the key of the flag: they are normalised before the gate


@frozen(kw_only=True)
class ShortConvKeys:
    """Gated short convolutions (LFM2)."""


RecurrentKeys = GatedDeltaKeys | KimiDeltaKeys | MambaKeys | Mamba2Keys | ShortConvKeys

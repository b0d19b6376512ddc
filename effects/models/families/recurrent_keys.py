"""What the rows of the family table say of recurrent sublayers; see family.py."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from attrs import frozen

LayerKind = Literal["attention", "recurrent"]


@frozen(kw_only=True)
class HybridLayers:
    """Which layers have an attention, and which a recurrent sublayer. The first of these
    that a config has decides.
    """

    # Kinds by their names in the list `layer_types`.
    names: Mapping[str, LayerKind] = MappingProxyType(
        {"full_attention": "attention", "linear_attention": "recurrent"}
    )
    # The key of how often a layer has an attention; 4 where a config has none.
    interval: str = ""


@frozen(kw_only=True)
class GatedDeltaKeys:
    """Gated delta nets (Qwen3-Next)."""

    # Queries, keys, values and output gates are one matrix in checkpoints, those of each
    # key head together; so are the gates of states. Else queries, keys and values are
    # one, and the others are separate (Qwen3.5).
    by_key_head: bool


RecurrentKeys = GatedDeltaKeys

"""A row of the family table: how models of one architecture differ from others.

All are decoders whose layers are made of the types in `architecture/layers.py`. A family
is a row, not a class: its values say how the configs name what is read, and which parts
there are. They are grouped by idea:

attention_keys.py  biases, norms of heads, their number, scores, positions, windows
layer_keys.py      norms, feed-forwards, what else is in a layer, factors, tensor names
expert_keys.py     experts and the choice among them
recurrent_keys.py  layers that keep a state instead of keys and values
mtp_keys.py        MTP heads in the checkpoint

A value that is the key of a config's field is empty where the family has no such field. A
`bool | str` is whether there is something, or the key of a flag that says so.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from attrs import field, frozen

from minfer.effects.models.families.attention_keys import (
    Biases,
    HeadKeys,
    Positions,
    QkNorm,
    Scores,
    Windows,
)
from minfer.effects.models.families.expert_keys import ExpertKeys
from minfer.effects.models.families.layer_keys import (
    Factors,
    FeedForward,
    LayerExtras,
    Multipliers,
    Norms,
    StoredNames,
)
from minfer.effects.models.families.mtp_keys import MtpKeys
from minfer.effects.models.families.recurrent_keys import HybridLayers, RecurrentKeys
from minfer.kernels.leaves import Activation


@frozen(kw_only=True)
class Variant:
    """What differs for configs that have these values, null being absent: values of the
    row, and values of the config that follow from them.
    """

    when: Mapping[str, Any]
    row: Mapping[str, Any] = MappingProxyType({})
    config: Mapping[str, Any] = MappingProxyType({})
    refusal: str = ""  # why such configs are refused


@frozen
class Family:
    """One row of the family table."""

    architecture: str
    model_type: str
    defaults: Mapping[str, Any]  # config values that transformers assumes when absent
    attention: Literal["gqa", "mla"] = field(default="gqa", kw_only=True)
    # None: all layers have an attention.
    hybrid: HybridLayers | None = field(default=None, kw_only=True)
    recurrent: RecurrentKeys | None = field(default=None, kw_only=True)
    # None: all layers are dense.
    experts: ExpertKeys | None = field(default=None, kw_only=True)
    activation: Activation = field(default="silu", kw_only=True)
    biases: Biases = field(factory=Biases, kw_only=True)
    qk_norm: QkNorm = field(factory=QkNorm, kw_only=True)
    heads: HeadKeys = field(factory=HeadKeys, kw_only=True)
    scores: Scores = field(factory=Scores, kw_only=True)
    positions: Positions = field(factory=Positions, kw_only=True)
    windows: Windows = field(factory=Windows, kw_only=True)
    norms: Norms = field(factory=Norms, kw_only=True)
    feed_forward: FeedForward = field(factory=FeedForward, kw_only=True)
    extras: LayerExtras = field(factory=LayerExtras, kw_only=True)
    factors: Factors = field(factory=Factors, kw_only=True)
    multipliers: Multipliers = field(factory=Multipliers, kw_only=True)
    stored: StoredNames = field(factory=StoredNames, kw_only=True)
    # None: its checkpoints have no MTP head, or minfer does not know its tensors.
    mtp: MtpKeys | None = field(default=None, kw_only=True)
    # Where a config has none, or null.
    eos_ids: tuple[int, ...] = field(default=(), kw_only=True)
    # The family's own names of config values, and those of most families.
    aliases: Mapping[str, str] = field(default=MappingProxyType({}), kw_only=True)
    # So, too, but the names of most families are known beside them, which have priority.
    synonyms: Mapping[str, str] = field(default=MappingProxyType({}), kw_only=True)
    # Names of values by those that they have in an object of a config, by its key; they
    # have priority, and there are no others in it.
    nested: Mapping[str, Mapping[str, str]] = field(
        default=MappingProxyType({}), kw_only=True
    )
    # Other names of the architecture in configs.
    class_aliases: tuple[str, ...] = field(default=(), kw_only=True)
    # Those of them that hold apply, one after the other.
    variants: tuple[Variant, ...] = field(default=(), kw_only=True)

    @property
    def own_names(self) -> Mapping[str, str]:
        """The family's own names by those of most families, which it does not know."""
        return {common: own for own, common in self.aliases.items()}

"""The description of a model, as a value: its layers, and what they share.

Nothing here touches files or imports torch: memory plans and `--help` need these numbers
at once. spec_reader.py reads it from a config.
"""

from attrs import frozen

from minfer.effects.models.families import Family
from minfer.effects.models.layers import Layer, LayerGroup, layer_groups
from minfer.effects.models.rope_scaling import Rope

EMBED, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"  # names in a checkpoint


@frozen(kw_only=True)
class ModelSpec:
    """Sizes of one model, from its config.json. Lengths in tokens, sizes in elements."""

    family: Family
    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]
    max_position_embeddings: int  # after scaling
    dtype: str  # of activations: the residual stream, norms, embeddings, logits
    _weight_dtype: str | None = None  # of the layers' matrices; None: the activations'
    _kv_dtype: str | None = None  # of the KV cache; None: the activations'
    eos_ids: tuple[int, ...]
    rms_norm_eps: float = 0.0
    rope: Rope | None = None  # None: transformers' model handles positions
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    # Counted on transformers' own model, which runs it; 0: the family table's.
    parameters: int = 0

    @property
    def weight_dtype(self) -> str:
        """The dtype of the layers' matrices."""
        return self._weight_dtype or self.dtype

    @property
    def kv_dtype(self) -> str:
        """The dtype of keys and values in the cache."""
        return self._kv_dtype or self.dtype

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The layers by their cache needs."""
        return layer_groups(self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each layer, how many keys up to its own a query attends to; None: all of
        them.
        """
        return tuple(layer.attention.window for layer in self.layers)

    # The following is the same in all layers of every known family.

    @property
    def heads(self) -> int:
        """Query heads of a layer."""
        return self.layers[0].attention.heads

    @property
    def kv_heads(self) -> int:
        """Key heads of a layer (and value heads)."""
        return self.layers[0].attention.kv_heads

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.layers[0].attention.head_dim

    @property
    def intermediate_size(self) -> int:
        """Width of a layer's feed-forward."""
        return self.layers[0].feed_forward.intermediate_size

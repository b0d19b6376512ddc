"""The description of a model, as a value: its layers, and what they share.

Nothing here touches files or imports torch: memory plans and `--help` need these numbers
at once. spec_reader.py reads it from a config.
"""

from typing import Final

from attrs import frozen

from minfer.effects.models.families import Family
from minfer.effects.models.kv_format import KvFormat
from minfer.effects.models.layers import Layer, LayerGroup, layer_groups
from minfer.effects.models.linear import LinearSizes, NormRule
from minfer.effects.models.moe import MoE
from minfer.effects.models.quantization import Quantization
from minfer.kernels.leaves import PLAIN, Scheme


def layer_prefix(layer: int) -> str:
    """Returns how the names of a layer's tensors begin in a checkpoint."""
    return f"model.layers.{layer}."


EMBED, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"  # names in a checkpoint


NO_NORMS: Final = NormRule(0.0)  # transformers' model has its own


@frozen(kw_only=True)
class ModelSpec:
    """Sizes of one model, from its config.json. Lengths in tokens, sizes in elements."""

    family: Family
    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]
    max_position_embeddings: int  # after scaling
    dtype: str  # of activations: the residual stream, norms, embeddings, logits
    _kv_dtype: str | None = None  # of the KV cache; None: the activations'
    quantization: Quantization | None = None  # of the layers' matrices
    eos_ids: tuple[int, ...]
    norms: NormRule = NO_NORMS
    embedding_scale: float = 1.0
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    # How names of a checkpoint's tensors begin that are not of this model: other parts of
    # a multimodal one, layers that predict further tokens.
    skipped: tuple[str, ...] = ()
    # Counted on transformers' own model, which runs it; 0: the family table's.
    parameters: int = 0

    @property
    def kv_dtype(self) -> str:
        """The dtype of keys and values in the cache."""
        return self._kv_dtype or self.dtype

    def scheme_of(self, layer: int, sizes: LinearSizes) -> Scheme:
        """Returns how a layer's matrix is stored in memory."""
        if self.quantization is None or sizes.plain:
            return PLAIN
        return self.quantization.scheme_of(layer_prefix(layer) + sizes.names[0])

    @property
    def has_experts(self) -> bool:
        """Whether any layer is a mixture of experts."""
        return any(isinstance(layer.feed_forward, MoE) for layer in self.layers)

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The layers by their cache needs."""
        return layer_groups(self.layers)

    @property
    def kv_formats(self) -> tuple[KvFormat, ...]:
        """How the cache stores what the layers of each group keep of a token."""
        return tuple(
            KvFormat.of(
                layers=len(group.members),
                token=group.attention.kv_shape,
                dtype=self.kv_dtype,
                layout=group.attention.kv_layout,
            )
            for group in self.groups
        )

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each layer, how many keys up to its own a query attends to; None: all of
        them.
        """
        return tuple(layer.attention.window for layer in self.layers)

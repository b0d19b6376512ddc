"""A draft head as a value: its sizes, and what it reads of the model that it drafts for,
its *target*.

Theory. A draft head is one decoder layer that guesses tokens behind the next one. Its
input for token t is the token's embedding e(t) together with a hidden state h of the
target for the token before t: both are normalised and put side by side, [e(t), h]. Of the
layer's result come logits for the token behind t, and the state that stands for h when
the head drafts the token after that: so one layer makes a chain of drafts. There are two
kinds:

- MTP, multi-token prediction (DeepSeek-V3, 2024): trained with the target, in the
  target's own checkpoint. h is the target's last hidden state. A matrix, the projection,
  brings [e(t), h] to the width of the residual stream, and a layer like the target's
  follows. Embedding and output head are the target's.
- EAGLE-3 (Li et al. 2025): trained later, in a checkpoint of its own. The projection
  comes first: it makes h of the residual streams before three layers of the target. Some
  heads have none, and h is the target's last hidden state.
  Queries, keys and values are products of [e(t), h], twice as wide; the residual stream
  is h alone. The output head may know the most frequent tokens only.

No torch here: memory plans need these sizes. `draft_heads/` reads heads from checkpoints
and computes with them.
"""

from typing import Final, Literal

from attrs import evolve, frozen

from minfer.effects.models.architecture.layers import Layer
from minfer.effects.models.architecture.linear import LinearSizes, NormRule
from minfer.effects.models.architecture.quantization import Quantization
from minfer.effects.models.ranks import RankInfo
from minfer.kernels.leaves import PLAIN, Scheme, Shard

MTP: Final = "mtp"  # the head is in the target's checkpoint
EAGLE3: Final = "eagle3"  # and in a checkpoint of its own


@frozen(kw_only=True)
class HeadNames:
    """Names of a head's tensors in its checkpoint; empty: it has no such tensor."""

    projection: str
    embedding_norm: str
    hidden_norm: str
    layer: str  # how the names of the layer's tensors begin
    norm: str  # of the layer's result
    state_norms: tuple[str, ...] = ()  # of the target's states, before the projection
    embed: str = ""
    lm_head: str = ""
    target_ids: str = ""
    # How names begin of tensors beside these that are not read, as they are copies of the
    # target's, or serve training.
    unread: tuple[str, ...] = ()


@frozen(kw_only=True)
class HeadSpec:
    """Sizes of a draft head, in elements, and what it reads of its target."""

    kind: Literal["mtp", "eagle3"]
    hidden_size: int
    layer: Layer
    norms: NormRule  # how the norms outside the layer work
    names: HeadNames
    # The residual streams of the target that it reads: before each of these layers, or
    # `BEHIND_LAST` of them; and whether the target's final norm is applied to that.
    hidden_layers: tuple[int, ...]
    after_norm: bool
    target_hidden_size: int
    vocab_size: int  # of the target
    # The tokens that its output head knows; None: it has the target's output head.
    draft_vocab_size: int | None = None
    logit_scale: float = 1.0  # of its own output head
    # What drafts the next token gets as hidden state: the layer's result, or that result
    # behind the last norm.
    chains_normed: bool = False
    # Whether the residual stream begins with the normalised hidden state (EAGLE-3).
    normed_residual: bool = False
    quantization: Quantization | None = None  # of its matrices

    def for_rank(self, rank_info: RankInfo) -> "HeadSpec":
        """Returns the sizes of one rank's part: of the layer; projection, embedding and
        output head of its own are whole on all ranks. Raises `UnsupportedModelError`.
        """
        return evolve(self, layer=self.layer.for_rank(rank_info))

    def reads(self, name: str) -> bool:
        """Returns whether a tensor of this name, in its checkpoint, is the head's."""
        names = self.names
        outside = (names.projection, names.embedding_norm, names.hidden_norm, names.norm)
        own = (names.layer, *(f"{stem}." for stem in outside if stem))
        return name.startswith(own) and not name.startswith(names.unread)

    @property
    def projection(self) -> LinearSizes | None:
        """The matrix that makes one hidden state of several, or of an embedding and a
        hidden state, if there is one.
        """
        if not self.names.projection:
            return None
        return LinearSizes(
            names=(self.names.projection,),
            outputs=(self.hidden_size,),
            inputs=self.streams_size if self.kind == EAGLE3 else 2 * self.hidden_size,
            shard=Shard.NONE,
        )

    @property
    def streams_size(self) -> int:
        """Width of all residual streams that it reads, side by side."""
        return len(self.hidden_layers) * self.target_hidden_size

    @property
    def state_norm_size(self) -> int:
        """Width of each of the norms before the projection, if there are any."""
        if not self.names.state_norms:
            return 0
        return self.streams_size // len(self.names.state_norms)

    @property
    def matrices(self) -> tuple[LinearSizes, ...]:
        """The matrices, with their whole names in the checkpoint."""
        of_layer = (sizes.with_prefix(self.names.layer) for sizes in self.layer.matrices)
        projection = self.projection
        return (*of_layer,) if projection is None else (projection, *of_layer)

    def scheme_of(self, sizes: LinearSizes) -> Scheme:
        """Returns how one of `matrices` is stored in memory."""
        if self.quantization is None or sizes.plain:
            return PLAIN
        return self.quantization.scheme_of(sizes.names[0])

    @property
    def norm_elements(self) -> int:
        """Elements of the norms outside the layer."""
        count = bool(self.names.norm) + 2
        of_states = self.state_norm_size * len(self.names.state_norms)
        return (count * self.hidden_size + of_states) * (1 + self.norms.bias)

    @property
    def float32_elements(self) -> int:
        """Elements of weights that are in float32 whatever the activations' dtype."""
        return self.layer.float32_elements + self.norm_elements * self.norms.wide

    @property
    def parameters(self) -> int:
        """Elements of all weights, those that it shares with its target left out."""
        embed = self.vocab_size * self.hidden_size if self.names.embed else 0
        head = (self.draft_vocab_size or 0) * self.hidden_size
        projection = 0 if self.projection is None else self.projection.elements
        outside = projection + self.norm_elements + embed + head
        return self.layer.parameters + outside

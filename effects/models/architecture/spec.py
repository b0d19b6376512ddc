"""The description of a model, as a value: its layers, and what they share.

Nothing here touches files or imports torch: memory plans and `--help` need these numbers
at once. spec_reader.py reads it from a config.
"""

from collections.abc import Iterator
from typing import Final

from attrs import evolve, frozen

from minfer.effects.models.architecture.altup import AltUp
from minfer.effects.models.architecture.draft_head import HeadSpec
from minfer.effects.models.architecture.kv_format import KvFormat
from minfer.effects.models.architecture.layer_inputs import InputTable
from minfer.effects.models.architecture.layers import (
    Attention,
    FeedForward,
    Layer,
    LayerGroup,
    layer_groups,
)
from minfer.effects.models.architecture.linear import LinearSizes, NormRule
from minfer.effects.models.architecture.moe import MoE
from minfer.effects.models.architecture.quantization import Quantization
from minfer.effects.models.architecture.state_parts import DEFAULT_STATE_DTYPE
from minfer.effects.models.config_reader import UnsupportedModelError
from minfer.effects.models.families.family import Family
from minfer.effects.models.ranks import WHOLE_MODEL, RankInfo
from minfer.kernels.leaves import PLAIN, Scheme


def layer_prefix(layer: int) -> str:
    """Returns how the names of a layer's tensors begin in a checkpoint."""
    return f"model.layers.{layer}."


EMBED, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"  # names in a checkpoint
HEAD_BIAS = "lm_head.bias"


# Ranks have whole chunks of the vocabulary where each has some: so they sample from their
# own parts of the logits (kernels/sample.py).
VOCAB_CHUNK: Final = 2048
NO_NORMS: Final = NormRule(0.0)  # transformers' model has its own


@frozen(kw_only=True)
class ModelSpec:
    """Sizes of one model, from its config.json. Lengths in tokens, sizes in elements."""

    family: Family
    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]  # of this rank
    first_layer: int = 0  # of these, in the model
    max_position_embeddings: int  # after scaling
    # Of a rope whose factors depend on a sequence's length (longrope): the tokens up to
    # which those of short ones hold, and whether the engine has those of long ones.
    original_context: int | None = None
    long_factors: bool = False
    dtype: str  # of activations: the residual stream, norms, embeddings, logits
    _kv_dtype: str | None = None  # of the KV cache; None: the activations'
    state_dtype: str = DEFAULT_STATE_DTYPE  # of the states of recurrent layers
    quantization: Quantization | None = None  # of the layers' matrices
    eos_ids: tuple[int, ...]
    norms: NormRule = NO_NORMS
    embedding_scale: float = 1.0
    logit_scale: float = 1.0  # multiplies logits
    logit_cap: float | None = None  # then they are cap * tanh(logit / cap)
    input_table: InputTable | None = None  # what makes the inputs of layers
    tie_word_embeddings: bool = False
    head_bias: bool = False  # of the output head, tied or not
    initializer_range: float = 0.02
    # How names of a checkpoint's tensors begin that are not of this model: other parts of
    # a multimodal one, layers that predict further tokens.
    skipped_prefixes: tuple[str, ...] = ()
    rank_info: RankInfo = WHOLE_MODEL  # the rank whose sizes these are
    all_stages: "ModelSpec | None" = None  # of a stage: the layers of all, as one
    # Counted on transformers' own model, which runs it; 0: the family table's.
    parameters: int = 0
    # Of that: its modules of type torch.nn.Linear, but the output head.
    linears: tuple[LinearSizes, ...] = ()
    draft_head: HeadSpec | None = None  # that drafts tokens for it

    def with_head_layer(self) -> "ModelSpec":
        """Returns the spec whose last layer is that of the draft head, if there is one:
        what the cache keeps of a token.
        """
        if self.draft_head is None:
            return self
        layers = (*self.layers, self.draft_head.layer)
        return evolve(self, layers=layers, draft_head=None)

    def with_context(self, length: int) -> "ModelSpec":
        """Returns the spec for an engine whose sequences have up to `length` tokens: with
        longrope's factors for it.
        """
        if self.original_context is None:
            return self
        is_long = length > self.original_context
        layers = tuple(layer.with_long_factors(is_long=is_long) for layer in self.layers)
        return evolve(self, layers=layers, long_factors=is_long)

    def for_rank(self, rank_info: RankInfo) -> "ModelSpec":
        """Returns the sizes of one rank; `vocab_size` stays the model's. Raises
        `UnsupportedModelError` for what cannot be divided.
        """
        if self.parameters and rank_info != WHOLE_MODEL:
            raise UnsupportedModelError(
                f"{self.family.architecture}, which transformers' own model runs, cannot "
                f"be divided among ranks; use one (tensor_parallel_size, "
                f"pipeline_parallel_size)"
            )
        if rank_info.parallel.pipeline > len(self.layers):
            raise UnsupportedModelError(
                f"{len(self.layers)} layers cannot be divided among "
                f"{rank_info.parallel.pipeline} stages (pipeline_parallel_size)"
            )
        if rank_info.parallel.pipeline > 1:
            self._check_stages()
        stage_layers = rank_info.layers(len(self.layers))
        layers = tuple(
            layer.for_rank(rank_info)
            for layer in self.layers[stage_layers.start : stage_layers.stop]
        )
        if all(layer.attention is None for layer in layers):
            raise UnsupportedModelError(
                f"{self.family.architecture}: of its {len(self.layers)} layers, stage "
                f"{rank_info.stage} of {rank_info.parallel.pipeline} would have none "
                f"with attention; use fewer stages (pipeline_parallel_size)"
            )
        head = self.draft_head
        rank_spec = evolve(
            self,
            layers=layers,
            first_layer=stage_layers.start,
            rank_info=rank_info,
            draft_head=None if head is None else head.for_rank(rank_info),
        )
        if rank_info.parallel.pipeline == 1:
            return rank_spec
        one_stage = RankInfo(
            rank_info.tensor_rank, evolve(rank_info.parallel, pipeline=1)
        )
        return evolve(rank_spec, all_stages=self.for_rank(one_stage))

    def _check_stages(self) -> None:
        """Raise `UnsupportedModelError` for layers that need more than the residual
        stream of the layers before them.
        """
        shares = any(layer.shares_keys_of is not None for layer in self.layers)
        if self.input_table is not None or shares:
            raise UnsupportedModelError(
                f"{self.family.architecture} cannot be divided into stages, as its "
                f"layers share keys or have inputs of their own; use one "
                f"(pipeline_parallel_size)"
            )

    @property
    def vocab_rows(self) -> range:
        """The tokens whose embeddings and logits this rank has. As many on each rank: the
        last ones may lie behind the vocabulary.
        """
        ranks = self.rank_info.parallel.tensor
        count = -(-self.vocab_size // ranks)
        chunks = -(-count // VOCAB_CHUNK) * VOCAB_CHUNK
        if ranks > 1 and chunks * (ranks - 1) < self.vocab_size:
            count = chunks
        return range(
            self.rank_info.tensor_rank * count, (self.rank_info.tensor_rank + 1) * count
        )

    @property
    def embed_rows(self) -> int:
        """Rows of the embedding that this rank has: in the first stage, and in the last
        if the output head is tied to it.
        """
        tied = self.tie_word_embeddings and self.rank_info.is_last_stage
        return len(self.vocab_rows) if self.rank_info.is_first_stage or tied else 0

    @property
    def head_rows(self) -> int:
        """Rows of the output head that this rank has: in the last stage."""
        return len(self.vocab_rows) if self.rank_info.is_last_stage else 0

    @property
    def kv_dtype(self) -> str:
        """The dtype of keys and values in the cache."""
        return self._kv_dtype or self.dtype

    @property
    def matrices(self) -> Iterator[LinearSizes]:
        """The matrices that may be quantized, with their whole names in a checkpoint."""
        if self.parameters:
            yield from self.linears
            return
        for i, layer in enumerate(self.layers, self.first_layer):
            for sizes in layer.matrices:
                yield sizes.with_prefix(layer_prefix(i))

    def scheme_of(self, sizes: LinearSizes) -> Scheme:
        """Returns how one of `matrices` is stored in memory."""
        if self.quantization is None or sizes.plain:
            return PLAIN
        return self.quantization.scheme_of(sizes.names[0])

    @property
    def altup(self) -> AltUp | None:
        """The residual streams, if there are several."""
        return self.layers[0].altup

    @property
    def has_experts(self) -> bool:
        """Whether any layer is a mixture of experts."""
        return any(isinstance(feed, MoE) for feed in self.feed_forwards)

    @property
    def has_states(self) -> bool:
        """Whether any layer keeps a state of a sequence."""
        return any(layer.state_parts for layer in self.layers)

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """Those of the layers that have one, in their order."""
        attentions = (layer.attention for layer in self.layers)
        return tuple(attention for attention in attentions if attention is not None)

    @property
    def feed_forwards(self) -> tuple[FeedForward, ...]:
        """Those of the layers that have one, in their order."""
        feeds = (layer.feed_forward for layer in self.layers)
        return tuple(feed for feed in feeds if feed is not None)

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The layers with an attention by their cache needs."""
        return layer_groups(self.layers)

    @property
    def kv_formats(self) -> tuple[KvFormat, ...]:
        """How the cache stores what the layers of each group keep of a token."""
        return tuple(
            KvFormat.of(
                layers=len(group.members)
                if group.attention.shares_keys_of is None
                else 0,
                token=group.attention.kv_shape,
                dtype=self.kv_dtype,
                layout=group.attention.kv_layout,
            )
            for group in self.groups
        )

    @property
    def has_mixed_layers(self) -> bool:
        """Whether layers keep different numbers of a token, or others in another rank."""
        attentions = [group.attention for group in self.groups]
        shares = any(attention.layers_a_slot > 1 for attention in attentions)
        return shares or len({attention.kv_shape for attention in attentions}) > 1

    @property
    def cached_heads(self) -> int:
        """The key heads that the cache keeps of a token; of latents, which are of all
        heads, 1.
        """
        _, heads, *_ = (*self.groups[0].attention.kv_shape, 1)
        return heads

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each layer with an attention, how many keys up to its own a query attends
        to; None: all of them.
        """
        return tuple(attention.window for attention in self.attentions)

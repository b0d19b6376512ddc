"""The weights of a draft head, and a checkpoint's tensors in them."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from attrs import evolve, frozen

from minfer.effects.models.architecture.draft_head import HeadSpec
from minfer.effects.models.architecture.layers import (
    LayerWeights,
    empty_layer,
    layer_parts,
)
from minfer.effects.models.architecture.linear import (
    WeightMaker,
    norm_parts,
    weight_parts,
)
from minfer.effects.models.architecture.quantization import PLAIN_FORM, CheckpointForm
from minfer.effects.models.parts import WeightPart
from minfer.kernels.leaves import Linear, Norm

if TYPE_CHECKING:
    import torch

ID_TYPES: Final = ("I64", "I32")  # of token ids in safetensors files


@frozen(eq=False, kw_only=True)
class DraftHeadWeights:
    """A draft head's weights."""

    projection: Linear | None  # None: the target's state is the head's
    embedding_norm: Norm  # [hidden]
    hidden_norm: Norm  # [hidden]
    layer: LayerWeights
    norm: Norm | None  # [hidden], of the layer's result; None: it goes on as it is
    state_norms: tuple[Norm, ...] = ()  # of the target's states, side by side
    embed: "torch.Tensor | None" = None  # [vocab, hidden]; None: the target's
    lm_head: Linear | None = None  # draft_vocab outputs; None: the target's
    # [draft_vocab] int64: the target's id of each token that `lm_head` knows; None: it
    # has the target's ids
    target_ids: "torch.Tensor | None" = None


def empty_head(
    head: HeadSpec, dtype: str, device: str = "cpu", ranks: int = 1
) -> DraftHeadWeights:
    """Returns uninitialised weights of the right shapes, to be filled through
    `head_parts`; `dtype` is that of the target's activations.
    """
    import torch

    plain = WeightMaker(dtype=dtype, device=device)
    make = evolve(plain, quantization=head.quantization, ranks=ranks)
    names = head.names
    embed = lm_head = target_ids = None
    if names.embed:
        embed = plain.matrix(head.vocab_size, head.hidden_size)
    if head.draft_vocab_size is not None:
        outputs = head.draft_vocab_size
        lm_head = Linear(weight=plain.matrix(outputs, head.hidden_size), parts=(outputs,))
        if names.target_ids:
            target_ids = torch.empty(outputs, dtype=torch.int64, device=device)
    return DraftHeadWeights(
        projection=None if head.projection is None else make.linear(head.projection),
        embedding_norm=plain.norm(head.hidden_size, head.norms),
        hidden_norm=plain.norm(head.hidden_size, head.norms),
        layer=empty_layer(head.layer, evolve(make, prefix=names.layer)),
        norm=plain.norm(head.hidden_size, head.norms) if names.norm else None,
        state_norms=tuple(
            plain.norm(head.state_norm_size, head.norms) for _ in names.state_norms
        ),
        embed=embed,
        lm_head=lm_head,
        target_ids=target_ids,
    )


def head_parts(
    head: HeadSpec, weights: DraftHeadWeights, form: CheckpointForm = PLAIN_FORM
) -> Iterator[WeightPart]:
    """Yields the tensors of a head's checkpoint, with their targets."""
    names = head.names
    if head.projection is not None and weights.projection is not None:
        yield from weight_parts(head.projection, weights.projection, form)
    norms = [
        (names.embedding_norm, weights.embedding_norm),
        (names.hidden_norm, weights.hidden_norm),
        (names.norm, weights.norm),
        *zip(names.state_norms, weights.state_norms, strict=True),
    ]
    for name, norm in norms:
        if norm is not None:
            yield from norm_parts(name, norm, head.norms)
    for weight_part in layer_parts(head.layer, weights.layer, form):
        yield weight_part.with_prefix(names.layer)
    if weights.embed is not None:
        yield WeightPart(names.embed, weights.embed, undivided=True)
    if weights.lm_head is not None:
        yield WeightPart(names.lm_head, weights.lm_head.weight, undivided=True)
    if weights.target_ids is not None:
        yield WeightPart(
            names.target_ids,
            weights.target_ids,
            _to_target_ids,
            types=ID_TYPES,
            undivided=True,
        )


def _to_target_ids(stored: "torch.Tensor") -> "torch.Tensor":
    """Returns the target's ids: a checkpoint stores them less the head's own."""
    import torch

    return stored + torch.arange(len(stored), device=stored.device)


def expected_head_parts(
    head: HeadSpec, dtype: str, form: CheckpointForm = PLAIN_FORM
) -> dict[str, WeightPart]:
    """Returns the tensors that a head's checkpoint has to have, by their names, without
    memory.
    """
    weights = empty_head(head, dtype, "meta")
    return {
        weight_part.name: weight_part for weight_part in head_parts(head, weights, form)
    }

"""A model's interface to the cache of its keys and values."""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from minfer.effects.models.batch import Batch


class PagedCache(Protocol):
    """Keys and values of all layers in blocks."""

    def mix(
        self,
        batch: "Batch",
        index: int,
        qkv: "Tensor",
        q_norm: "Tensor | None",
        k_norm: "Tensor | None",
    ) -> "Tensor":
        """`attend`, for heads that are neither normalised nor rotated yet.

        `q_norm` and `k_norm` [head_dim] normalise each query and key head; None: they
        are not normalised.
        """
        ...

    def attend(
        self, batch: "Batch", index: int, qkv: "Tensor", scale: float | None = None
    ) -> "Tensor":
        """Write the new keys and values of the layer `index`, and let each token attend
        to its context, in its window.

        `qkv` [tokens, (heads + 2 * kv_heads) * head_dim], which may be written to;
        returns [tokens, heads * head_dim]. `scale` multiplies the scores; None is
        head_dim ** -0.5.
        """
        ...

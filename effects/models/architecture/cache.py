"""A model's interface to the cache of its keys and values, and of its states."""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from minfer.effects.models.architecture.batch import Batch
    from minfer.kernels.leaves import HeadWeights, LatentWeights
    from minfer.kernels.paged_states import PagedUnits


class LayerState(Protocol):
    """Where a recurrent layer keeps the states of sequences."""

    def part(self, name: str) -> "PagedUnits":
        """Returns where one of the layer's `state_parts` lies."""
        ...


class PagedCache(Protocol):
    """Keys and values of all layers in blocks, and states of recurrent ones."""

    def state(self, index: int) -> LayerState:
        """Returns where the layer `index`, a recurrent one, keeps states."""
        ...

    def rotate_and_attend(
        self,
        batch: "Batch",
        index: int,
        qkv: "Tensor",
        heads: "HeadWeights",
    ) -> "Tensor":
        """`attend` with the layer's scale, for heads that are neither normalised nor
        rotated yet.
        """
        ...

    def mix_latent(
        self,
        batch: "Batch",
        index: int,
        query: "Tensor",
        latent: "Tensor",
        weights: "LatentWeights",
    ) -> "Tensor":
        """Norm and rotate latents [tokens, rank + rope_dim], rotate queries [tokens,
        heads * query_dim], both in place, write the latents of the layer `index`, and let
        each token attend to its context; returns [tokens, heads * value_dim].
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

    def store(
        self, batch: "Batch", index: int, kv: "Tensor", heads: "HeadWeights"
    ) -> None:
        """Norm and rotate keys, and write keys and values `kv` [tokens, 2 * kv_heads *
        head_dim] of the layer `index`, as `rotate_and_attend` does.
        """
        ...

    def store_latent(
        self, batch: "Batch", index: int, latent: "Tensor", weights: "LatentWeights"
    ) -> None:
        """Norm, rotate and write latents [tokens, rank + rope_dim] of the layer `index`,
        as `mix_latent` does; `latent` may be written to.
        """
        ...

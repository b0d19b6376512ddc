"""Matrices of a model: their sizes, their places in a checkpoint, and each rank's part.

Theory. Nearly all bytes of a model are matrices, y = x @ weight.T + bias, and deployments
differ in two things about them. The *scheme* is how their numbers are stored, and so
which kernel multiplies with them (kernels/leaves.py has it, products.py chooses):
unquantized, or in fewer bits with scales. The *shard axis* is how ranks of tensor
parallelism split them (Shoeybi et al. 2019): by columns of the product, of which each
rank then has a part, or by rows of it, where each rank has a part of every sum. A column
split followed by a row split needs one sum over the ranks.

Matrices that read the same input are *fused*, one below the other (queries, keys and
values; gate and up): at batch 1 each product costs a launch and a pass over its input.
They are still separate in a checkpoint, and split among ranks one by one.

torch is imported only where tensors are made.
"""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from attrs import evolve, frozen

from minfer.effects.models.config_reader import UnsupportedModelError
from minfer.effects.models.dtypes import torch_dtype
from minfer.effects.models.parts import Part
from minfer.kernels.leaves import PLAIN, Linear, Norm, Scheme, Shard

if TYPE_CHECKING:
    from torch import Tensor

# Elements: about where a matrix does not fit the CPU's own cache any more.
BY_COLUMN: Final = 1 << 22


@frozen
class LinearSizes:
    """The sizes of a `Linear`, known before there are tensors."""

    names: tuple[str, ...]  # of the matrices fused in it, in a layer of a checkpoint
    outputs: tuple[int, ...]  # of each of them
    inputs: int
    shard: Shard
    bias: bool = False

    @property
    def matrix_elements(self) -> int:
        """Elements of the matrix, without the bias."""
        return sum(self.outputs) * self.inputs

    @property
    def elements(self) -> int:
        """Elements of matrix and bias."""
        return self.matrix_elements + sum(self.outputs) * self.bias


@frozen
class NormRule:
    """How the norms of a sublayer work."""

    eps: float
    # Checkpoints store factors less 1; the product with them is in float32 (Gemma).
    offset: bool = False
    # The sublayer's result is normalised too, before it is added (Gemma).
    after: bool = False


@frozen
class Maker:
    """Makes a model's uninitialised tensors: matrices in one dtype, the rest in another.

    The rest (norms, biases, embeddings) is in the activations' dtype.
    """

    dtype: str
    weight_dtype: str
    device: str

    def linear(self, sizes: LinearSizes) -> Linear:
        """Returns a matrix. Raises `UnsupportedModelError` for dtypes that no kernel
        multiplies.
        """
        return Linear(
            weight=self.matrix(sum(sizes.outputs), sizes.inputs, dtype=self.weight_dtype),
            bias=self.vector(sum(sizes.outputs)) if sizes.bias else None,
            scheme=scheme_of(self.weight_dtype, self.dtype),
            shard=sizes.shard,
            parts=sizes.outputs,
        )

    def matrix(self, *shape: int, dtype: str | None = None) -> "Tensor":
        """Returns a matrix [rows, columns], or several [count, rows, columns], in `dtype`
        or the activations'.

        Large float32 ones with more outputs than inputs are stored by column on the CPU:
        there a product with few rows is twice as fast (MKL), of an expert 1.25 times, and
        no slower with many.
        """
        import torch

        *count, rows, columns = shape
        kind, place = torch_dtype(dtype or self.dtype), torch.device(self.device)
        turned = place.type == "cpu" and kind is torch.float32 and rows > columns
        if turned and math.prod(shape) >= BY_COLUMN:
            return torch.empty((*count, columns, rows), dtype=kind).mT
        return torch.empty(shape, dtype=kind, device=place)

    def vector(self, size: int, dtype: str | None = None) -> "Tensor":
        """Returns [size] in `dtype`, or the activations'."""
        return self.tensor(size, dtype=dtype)

    def norm(self, size: int, rule: NormRule) -> Norm:
        """Returns a norm of `size` elements."""
        return Norm(self.vector(size, "float32" if rule.offset else None), rule.eps)

    def tensor(self, *shape: int, dtype: str | None = None) -> "Tensor":
        """Returns a tensor in `dtype`, or the activations'."""
        import torch

        kind = torch_dtype(dtype or self.dtype)
        return torch.empty(shape, dtype=kind, device=self.device)


def scheme_of(weight_dtype: str, dtype: str) -> Scheme:
    """Returns the scheme of matrices in `weight_dtype` that multiply activations in
    `dtype`.

    Raises `UnsupportedModelError` if there is none.
    """
    if weight_dtype != dtype:
        raise UnsupportedModelError(
            f"weights in {weight_dtype} under activations in {dtype} are not supported; "
            f"use one type for both"
        )
    return PLAIN


def weight_parts(sizes: LinearSizes, linear: Linear) -> Iterator[Part]:
    """Yields each fused matrix: its name in a layer of a checkpoint, and its place."""
    for name, part in zip(
        sizes.names, linear.weight.split_with_sizes(linear.parts), strict=True
    ):
        yield Part(f"{name}.weight", part)


def bias_parts(sizes: LinearSizes, linear: Linear) -> Iterator[Part]:
    """Yields the bias of each fused matrix, likewise; nothing if there are none."""
    if linear.bias is not None:
        for name, part in zip(
            sizes.names, linear.bias.split_with_sizes(linear.parts), strict=True
        ):
            yield Part(f"{name}.bias", part)


def norm_part(name: str, norm: Norm, rule: NormRule) -> Part:
    """Returns the place of a norm's factors."""
    return Part(f"{name}.weight", norm.weight, _plus_one if rule.offset else None)


def _plus_one(stored: "Tensor") -> "Tensor":
    return stored.float() + 1


def sharded(linear: Linear, rank: int, ranks: int) -> Linear:
    """Returns the part of a matrix that rank `rank` of `ranks` has, by its shard axis.

    Where products are summed over the ranks, only the first has the bias. Raises
    ValueError if the matrix cannot be split evenly.
    """
    if linear.scheme is not PLAIN:
        raise ValueError(f"scales of {linear.scheme.name} matrices cannot be divided yet")
    if linear.shard is Shard.NONE:
        return linear
    if linear.shard is Shard.ROW:
        inputs = _share(linear.weight.shape[1], ranks)
        weight = linear.weight.narrow(1, rank * inputs, inputs).contiguous()
        return evolve(linear, weight=weight, bias=None if rank else linear.bias)
    parts = tuple(_share(outputs, ranks) for outputs in linear.parts)
    return evolve(
        linear,
        weight=_rows_of(linear.weight, linear.parts, rank, ranks),
        bias=None
        if linear.bias is None
        else _rows_of(linear.bias, linear.parts, rank, ranks),
        parts=parts,
    )


def _share(size: int, ranks: int) -> int:
    if size % ranks:
        raise ValueError(f"{size} features cannot be divided evenly among {ranks} ranks")
    return size // ranks


def _rows_of(fused: "Tensor", parts: Sequence[int], rank: int, ranks: int) -> "Tensor":
    """Returns one rank's rows of each fused part, one below the other again."""
    import torch

    return torch.cat([part.chunk(ranks)[rank] for part in fused.split_with_sizes(parts)])

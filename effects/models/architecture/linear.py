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
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

from attrs import evolve, frozen

from minfer.effects.models.architecture.quantization import (
    PLAIN_FORM,
    CheckpointForm,
    Quantization,
)
from minfer.effects.models.config_reader import UnsupportedModelError
from minfer.effects.models.dtypes import dtype_bytes, torch_dtype
from minfer.effects.models.parts import WeightPart
from minfer.kernels.leaves import PLAIN, Linear, Norm, Scheme, Shard

if TYPE_CHECKING:
    from torch import Tensor

# Elements: about where a matrix does not fit the CPU's own cache any more.
# In the metadata of a field of weights whose sizes are `plain`.
IN_FULL_NUMBERS: Final = "in full numbers"
PLAIN_LEAF: Final = {IN_FULL_NUMBERS: True}
MIN_BY_COLUMN_ELEMENTS: Final = 1 << 22


@frozen
class LinearSizes:
    """The sizes of a `Linear`, known before there are tensors."""

    # Of the matrices fused in it, in a layer of a checkpoint; one name of several
    # matrices: the checkpoint stores them as one.
    names: tuple[str, ...]
    outputs: tuple[int, ...]  # of each of them
    inputs: int
    shard: Shard
    bias: bool = False
    experts: int = 0  # whose matrices are one leaf; 0: it is not of experts
    # Those of the matrices that all ranks have whole, where ranks divide others.
    whole: tuple[str, ...] = ()
    # Dequantized as it is loaded, if the checkpoint's is quantized.
    plain: bool = False
    # What the outputs of each of the matrices are multiplied with in the model, and each
    # of their biases: with these they are loaded. None: nothing.
    factors: tuple[float, ...] | None = None
    bias_factors: tuple[float, ...] | None = None

    def with_prefix(self, prefix: str) -> "LinearSizes":
        """Returns the same sizes, the names behind a prefix."""
        return evolve(self, names=tuple(prefix + name for name in self.names))

    @property
    def stored(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The name of each matrix of a checkpoint, with the outputs of those in it."""
        if len(self.names) == 1:
            return ((self.names[0], self.outputs),)
        by_name = zip(self.names, self.outputs, strict=True)
        return tuple((name, (outputs,)) for name, outputs in by_name)

    @property
    def divided(self) -> tuple[int, ...]:
        """The sizes that ranks divide: inputs, or outputs of each matrix."""
        if self.shard is Shard.ROW:
            return (self.inputs,)
        return tuple(
            outputs
            for name, all_outputs in self.stored
            if name not in self.whole
            for outputs in all_outputs
        )

    @property
    def matrix_elements(self) -> int:
        """Elements of the matrix, without the bias."""
        return max(1, self.experts) * sum(self.outputs) * self.inputs

    @property
    def elements(self) -> int:
        """Elements of matrix and bias."""
        biases = max(1, self.experts) * sum(self.outputs) * self.bias
        return self.matrix_elements + biases

    def matrix_bytes(self, scheme: Scheme, dtype: str, *, cuda: bool) -> int:
        """Returns the bytes of the matrix, as its kernels store it, under activations of
        `dtype`.
        """
        used, element = PLAIN if self.plain else scheme, dtype_bytes(dtype)
        sizes = sum(self.outputs), self.inputs
        stored = used.matrix_bytes(*sizes, element)
        if not cuda:
            stored += used.packing_bytes(*sizes, dtype, element)
        return max(1, self.experts) * stored


@frozen
class NormRule:
    """How the norms of a sublayer work."""

    eps: float
    # Checkpoints store factors less 1; the product with them is in float32 (Gemma).
    offset: bool = False
    centered: bool = False  # LayerNorm, not RMSNorm
    bias: bool = False
    float32: bool = False  # the product with factors is in float32 (Gemma 4)
    # Names in a layer of a checkpoint of the norm of the sublayer's input, and of that of
    # its result, before it is added; empty: there is no such norm.
    before_name: str = "input_layernorm"
    after_name: str = ""
    # What a sublayer adds to the residual stream is multiplied with it in the model. The
    # stream is kept divided by it instead, so that nothing has to be multiplied.
    residual_multiplier: float = 1.0

    @property
    def of_stream(self) -> "NormRule":
        """The rule of norms of the residual stream, as it is kept."""
        return evolve(self, eps=self.eps / self.residual_multiplier**2)

    @property
    def wide(self) -> bool:
        """Whether factors are kept in float32."""
        return self.offset or self.float32

    @property
    def before(self) -> bool:
        """Whether the sublayer's input is normalised."""
        return bool(self.before_name)

    @property
    def after(self) -> bool:
        """Whether the sublayer's result is normalised, before it is added."""
        return bool(self.after_name)

    def elements(self, hidden_size: int) -> int:
        """Returns the factors and biases of a sublayer's norms."""
        return hidden_size * (self.before + self.after) * (1 + self.bias)

    def float32_elements(self, hidden_size: int) -> int:
        """Returns those that are kept in float32."""
        return self.elements(hidden_size) * self.wide


@frozen
class WeightMaker:
    """Makes the uninitialised tensors of a layer, in the activations' dtype but for
    quantized matrices.
    """

    dtype: str
    device: str
    quantization: Quantization | None = None
    prefix: str = ""  # of the layer's names in a checkpoint
    ranks: int = 1  # tensor parallel ones, which divide the matrices

    @property
    def has_memory(self) -> bool:
        """Whether tensors have memory, or only shapes."""
        return self.device != "meta"

    def linear(self, sizes: LinearSizes) -> Linear:
        """Returns a matrix, or those of experts. Raises `UnsupportedModelError`."""
        scheme, rows = self.scheme(sizes), sum(sizes.outputs)
        count = (sizes.experts,) if sizes.experts else ()
        bias = self.tensor(*count, rows) if sizes.bias else None
        make_leaf = partial(Linear, bias=bias, shard=sizes.shard, parts=sizes.outputs)
        if scheme.is_plain:
            return make_leaf(weight=self.matrix(*count, rows, sizes.inputs))
        groups = scheme.groups(sizes.inputs)
        scales = self.tensor(*count, rows, groups, dtype=scheme.scales or None)
        zeros = self.tensor(*count, rows, groups, dtype="uint8") if scheme.zeros else None
        has_factors = scheme.has_factors
        stored = self.tensor(
            *count, rows, sizes.inputs // scheme.numbers, dtype=scheme.storage
        )
        factors = self.tensor(*count, rows, 1, dtype="float32") if has_factors else None
        return make_leaf(
            weight=stored, scheme=scheme, scales=scales, zeros=zeros, factors=factors
        )

    def scheme(self, sizes: LinearSizes) -> Scheme:
        """Returns the scheme of all the matrices that are fused in one. Raises
        `UnsupportedModelError` for those of which only some are quantized, and for
        groups that do not divide the inputs.
        """
        if self.quantization is None:
            return PLAIN
        if sizes.plain and self.quantization.at_load:
            return PLAIN
        names = sizes.names[:1] if sizes.experts else sizes.names
        first, *other_names = (self.prefix + name for name in names)
        scheme = self.quantization.scheme_of(first)
        for name in other_names:
            if self.quantization.scheme_of(name) != scheme:
                raise UnsupportedModelError(
                    f"of {first} and {name}, which are one matrix here, only one is "
                    f"quantized, or has scales; use a checkpoint in which both are, or "
                    f"neither"
                )
        if self.ranks > 1 and scheme.bits == 8 and scheme.group:
            self._check_blocks(sizes, scheme.group)
        if scheme.bits == 4 and sizes.inputs % scheme.group:
            raise UnsupportedModelError(
                f"{first}: groups of {scheme.group} do not divide its {sizes.inputs} "
                f"inputs; choose smaller groups, or 8 bits"
            )
        return scheme

    def _check_blocks(self, sizes: LinearSizes, block_size: int) -> None:
        """Refuse a matrix whose blocks, of one scale each, would be divided
        among ranks.
        """
        ragged = dict.fromkeys(size for size in sizes.divided if size % block_size)
        if ragged:
            divided = "inputs" if sizes.shard is Shard.ROW else "outputs"
            raise UnsupportedModelError(
                f"{self.prefix}{sizes.names[0]}: {self.ranks} ranks would have "
                f"{' and '.join(map(str, ragged))} of its {divided}, which blocks of "
                f"{block_size} by {block_size} with one scale do not divide; use fewer "
                f"(tensor_parallel_size)"
            )

    def matrix(self, *shape: int) -> "Tensor":
        """Returns a matrix [rows, columns], or several [count, rows, columns].

        Large float32 ones with more outputs than inputs are stored by column on the CPU:
        there a product with few rows is twice as fast (MKL), of an expert 1.25 times, and
        no slower with many.
        """
        import torch

        *count, rows, columns = shape
        kind, device = torch_dtype(self.dtype), torch.device(self.device)
        by_column = device.type == "cpu" and kind is torch.float32 and rows > columns
        if by_column and math.prod(shape) >= MIN_BY_COLUMN_ELEMENTS:
            return torch.empty((*count, columns, rows), dtype=kind).mT
        return torch.empty(shape, dtype=kind, device=device)

    def vector(self, size: int, dtype: str | None = None) -> "Tensor":
        """Returns [size] in `dtype`, or the activations'."""
        return self.tensor(size, dtype=dtype)

    def norm(self, size: int, rule: NormRule, heads: int = 0) -> Norm:
        """Returns a norm of `size` elements; with `heads`, each has its own factors."""
        shape = (heads, size) if heads else (size,)
        return Norm(
            self.tensor(*shape, dtype="float32" if rule.wide else None),
            rule.eps,
            self.tensor(*shape) if rule.bias else None,
            centered=rule.centered,
        )

    def unit_norm(self, size: int, rule: NormRule) -> Norm:
        """Returns a norm without factors: they are 1."""
        return Norm(self.vector(size, "float32").fill_(1), rule.eps)

    def sublayer_norms(
        self, hidden_size: int, rule: NormRule
    ) -> tuple[Norm | None, Norm | None]:
        """Returns the norms of a sublayer's input and of its result, if it has them."""
        before = self.norm(hidden_size, rule.of_stream) if rule.before else None
        return before, self.norm(hidden_size, rule) if rule.after else None

    def tensor(self, *shape: int, dtype: str | None = None) -> "Tensor":
        """Returns a tensor in `dtype`, of torch, or the activations'."""
        import torch

        kind = getattr(torch, dtype) if dtype else torch_dtype(self.dtype)
        return torch.empty(shape, dtype=kind, device=self.device)


def weight_parts(
    sizes: LinearSizes, linear: Linear, form: CheckpointForm = PLAIN_FORM
) -> Iterator[WeightPart]:
    """Yields the tensors of each fused matrix, as a layer of a checkpoint names them,
    with their targets.
    """
    factors = sizes.factors or (1.0,) * len(sizes.outputs)
    if len(sizes.names) == 1:
        for weight_part in matrix_parts(sizes.names[0], linear, form):
            scaled = _scaled(weight_part, linear, sizes.outputs, factors)
            yield evolve(scaled, pieces=_pieces(sizes))
        return
    pieces = zip(sizes.names, linear.pieces(), factors, strict=True)
    for name, matrix, factor in pieces:
        for weight_part in matrix_parts(name, matrix, form):
            yield _scaled(weight_part, matrix, matrix.parts, (factor,))


def _pieces(sizes: LinearSizes) -> tuple[int, ...]:
    """Returns the outputs of each matrix, if a checkpoint stores several as one and ranks
    divide their outputs.
    """
    is_divided = len(sizes.outputs) > 1 and sizes.shard is Shard.COLUMN
    return sizes.outputs if is_divided else ()


def matrix_parts(name: str, linear: Linear, form: CheckpointForm) -> Iterator[WeightPart]:
    """Yields the tensors of one matrix of that name."""
    if linear.scheme.is_plain:
        yield WeightPart(f"{name}.weight", linear.weight, matrix=name)
        return
    for weight_part in form.format_of(name).parts(name, linear):
        is_scales = weight_part.target is linear.scales
        is_scales |= weight_part.target is linear.factors
        yield evolve(weight_part, matrix=name, scales=is_scales)


def _scaled(
    weight_part: WeightPart,
    linear: Linear,
    outputs: tuple[int, ...],
    factors: tuple[float, ...],
) -> WeightPart:
    """Returns a tensor of a matrix, so many outputs multiplied with each of the factors:
    of a quantized one its scales, or their factors, if it has some. Raises
    `UnsupportedModelError` for scales that are powers of two.
    """
    scales = linear.scales if linear.factors is None else linear.factors
    is_scaled = scales is None or weight_part.take is not None
    is_scaled = is_scaled or weight_part.target is scales
    if not is_scaled or all(factor == 1 for factor in factors):
        return weight_part
    if weight_part.take is None and not weight_part.target.is_floating_point():
        raise UnsupportedModelError(
            f"{weight_part.name}: scales that are powers of two cannot be multiplied "
            f"with {factors}, as config.json says; use a checkpoint in another format"
        )
    return weight_part.rearranged(partial(_multiplied, outputs, factors))


def _multiplied(
    outputs: tuple[int, ...], factors: tuple[float, ...], stored: "Tensor"
) -> "Tensor":
    """Returns so many outputs multiplied with each of the factors."""
    import torch

    pieces = zip(stored.float().split_with_sizes(outputs), factors, strict=True)
    return torch.cat([piece * factor for piece, factor in pieces])


def unquantized(linear: Linear, dtype: str) -> Linear:
    """Returns a matrix in full numbers."""
    if linear.scheme.is_plain:
        return linear
    from minfer.kernels.quantized import dequantize

    weight = dequantize(linear).to(torch_dtype(dtype))
    return evolve(
        linear, weight=weight, scheme=PLAIN, scales=None, zeros=None, factors=None
    )


def bias_parts(sizes: LinearSizes, linear: Linear) -> Iterator[WeightPart]:
    """Yields the bias of each fused matrix; nothing if there are none."""
    if linear.bias is None:
        return
    is_summed = sizes.shard is Shard.ROW
    factors = sizes.bias_factors or (1.0,) * len(sizes.outputs)
    is_single = len(sizes.names) == 1
    by_name = [factors] if is_single else [(factor,) for factor in factors]
    biases = linear.bias.split_with_sizes([sum(outputs) for _, outputs in sizes.stored])
    parts = zip(sizes.stored, biases, by_name, strict=True)
    for (name, outputs), bias, factors_of_name in parts:
        pieces = _pieces(sizes) if is_single else ()
        part = WeightPart(f"{name}.bias", bias, on_one_rank=is_summed, pieces=pieces)
        if any(factor != 1 for factor in factors_of_name):
            part = part.rearranged(partial(_multiplied, outputs, factors_of_name))
        yield part


def sublayer_norm_parts(
    before: Norm | None, after: Norm | None, rule: NormRule
) -> Iterator[WeightPart]:
    """Yields the norms of a sublayer, as a layer of a checkpoint names them."""
    for name, norm in ((rule.before_name, before), (rule.after_name, after)):
        if norm is not None:
            yield from norm_parts(name, norm, rule)


def norm_parts(name: str, norm: Norm, rule: NormRule) -> Iterator[WeightPart]:
    """Yields the tensors of a norm."""
    yield norm_part(name, norm, rule)
    if norm.bias is not None:
        yield WeightPart(f"{name}.bias", norm.bias)


def norm_part(name: str, norm: Norm, rule: NormRule) -> WeightPart:
    """Returns the tensor of a norm's factors."""
    return WeightPart(f"{name}.weight", norm.weight, _plus_one if rule.offset else None)


def _plus_one(stored: "Tensor") -> "Tensor":
    return stored.float() + 1

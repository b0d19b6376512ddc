"""One place multiplies with Linear leaves, and sums over ranks before the residual."""

from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from torch import Tensor

from minfer.effects.models.architecture.linear import LinearSizes
from minfer.effects.models.architecture.product_context import ProductContext
from minfer.effects.models.architecture.products import (
    add_product,
    feed,
    in_kernel_layout,
    norm_linear,
)
from minfer.effects.models.config_reader import UnsupportedModelError
from minfer.effects.models.ranks import SINGLE_RANK, Parallel, RankInfo, SingleRank
from minfer.kernels import fp8_blocks, plain
from minfer.kernels.leaves import FP8_BLOCKS, PLAIN, Linear, Norm, Shard
from tests.effects.models.architecture.test_linear import filled

SIZES = LinearSizes(("down",), (16,), 24, Shard.ROW, bias=True)
CONTEXT = ProductContext(on_gpu=False)
X, NORM = torch.randn(5, 24), Norm(torch.rand(24), 1e-6)


@frozen(eq=False)
class Twice(SingleRank):
    """A rank beside another one with equal parts."""

    rank_info: RankInfo

    def sum(self, partial: Tensor) -> Tensor:
        return 2 * partial


def test_products_are_the_kernels_own() -> None:
    linear = filled(SIZES)
    product = norm_linear(X, NORM, linear, CONTEXT)
    assert product.equal(plain.norm_linear(X, NORM, linear))
    down = filled(LinearSizes(("down",), (24,), 8, Shard.ROW))
    residual, expected = X.clone(), X.clone()
    feed(residual, NORM, linear, down, "silu", CONTEXT, SINGLE_RANK)
    plain.linear_add(expected, plain.norm_gated(X, NORM, linear), down)
    assert residual.equal(expected)


def test_on_one_rank_the_product_is_added_within_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []
    linear, residual = filled(SIZES), torch.randn(5, 16)
    expected = residual.clone()
    plain.linear_add(expected, X, linear)
    real = plain.linear_add

    def recorded(*args: Any) -> None:
        calls.append(args)
        real(*args)

    monkeypatch.setattr(plain, "linear_add", recorded)
    add_product(residual, X, linear, CONTEXT, SINGLE_RANK)
    [arguments] = calls
    for passed, argument in zip(arguments, (residual, X, linear), strict=True):
        assert passed is argument
    assert residual.equal(expected)


def test_a_feed_forward_is_summed_and_normalised_before_it_is_added() -> None:
    linear = filled(SIZES)
    down = filled(LinearSizes(("down",), (24,), 8, Shard.ROW))
    partial = torch.zeros_like(X)
    feed_of_x = plain.norm_gated(X, NORM, linear)
    plain.linear_add(partial, feed_of_x, down)
    residual, twice = X.clone(), Twice(RankInfo(0, Parallel(tensor=2)))
    feed(residual, NORM, linear, down, "silu", CONTEXT, twice, NORM)
    torch.testing.assert_close(residual, X + plain.normalise(2 * partial, NORM))


def test_schemes_without_kernels_are_refused_by_name() -> None:
    linear = evolve(filled(SIZES), scheme=evolve(PLAIN, name="fp8", cpu=""))
    with pytest.raises(UnsupportedModelError, match="no kernels for fp8"):
        norm_linear(X, NORM, linear, CONTEXT)
    with pytest.raises(UnsupportedModelError, match="fp8"):
        feed(X, NORM, linear, linear, "silu", CONTEXT, SINGLE_RANK)
    with pytest.raises(UnsupportedModelError, match="fp8"):
        add_product(torch.zeros(5, 16), X, linear, CONTEXT, SINGLE_RANK)


def test_leaves_of_a_gpu_have_what_its_library_multiplies_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OnGPU(Tensor):
        is_cuda = True

    monkeypatch.setattr(fp8_blocks, "_has_product", lambda _: True)
    weight, scales = torch.zeros(128, 128).to(torch.float8_e4m3fn), torch.ones(128, 1)
    leaf = Linear(weight=weight, scales=scales, scheme=FP8_BLOCKS, parts=(128,))
    blocks = in_kernel_layout(evolve(leaf, weight=weight.as_subclass(OnGPU))).blocks
    assert blocks is not None
    assert blocks.tolist() == [[1, 0, 0, 0]]
    assert in_kernel_layout(leaf).blocks is None

"""Products in plain torch, at every number of rows and however a matrix is stored."""

import pytest
import torch
from torch import Tensor

from minfer.kernels import plain
from minfer.kernels.leaves import Linear

OUTPUTS, INPUTS = 24, 40


@pytest.mark.parametrize("rows", [1, 2, 8, 9])
@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_the_matrix_times_each_row(
    rows: int, by_column: bool, bias: bool
) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, INPUTS), torch.randn(OUTPUTS, INPUTS)
    if by_column:
        weight = weight.t().contiguous().t()
    leaf = Linear(
        weight=weight, bias=torch.randn(OUTPUTS) if bias else None, parts=(OUTPUTS,)
    )
    want = x.double() @ weight.t().double()
    if leaf.bias is not None:
        want = want + leaf.bias.double()
    product = plain.linear(x, leaf)
    assert product.is_contiguous()
    torch.testing.assert_close(product.double(), want, rtol=1e-5, atol=1e-5)
    residual = torch.randn(rows, OUTPUTS)
    before = residual.double()
    plain.linear_add(residual, x, leaf)
    torch.testing.assert_close(residual.double(), before + want, rtol=1e-5, atol=1e-5)


def test_on_a_gpu_each_product_is_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a router in float32, for one, which no kernel takes from 5 rows on."""

    class OnGPU(Tensor):
        is_cuda = True

    x = torch.randn(5, INPUTS).as_subclass(OnGPU)
    weight, bias = torch.randn(OUTPUTS, INPUTS), torch.randn(OUTPUTS)
    monkeypatch.delattr(torch, "mm")  # the first of three
    product = plain.linear(x, Linear(weight=weight, bias=bias, parts=(OUTPUTS,)))
    want = x.double() @ weight.t().double() + bias
    torch.testing.assert_close(product.double(), want, rtol=1e-5, atol=1e-5)

"""Products in plain torch, at every number of rows and however a matrix is stored."""

import pytest
import torch

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

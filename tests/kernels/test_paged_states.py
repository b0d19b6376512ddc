"""States of rows in pages are gathered and scattered by index."""

import pytest
import torch

from minfer.kernels.paged_states import gather_states, scatter_states

from .conftest import CUDA, ints
from .paged import FIRST_PAGE, FIRST_UNIT, PER_PAGE, PagedRows

DEVICE = "cuda" if CUDA else "cpu"


def test_units_lie_where_the_table_says() -> None:
    rows = PagedRows(3, 5, 2, 4, dtype=torch.float32, device=DEVICE)
    assert rows.units.unit_shape == (2, 4)
    values = torch.randn(2, 5, 2, 4, device=DEVICE)
    scatter_states(rows.units, rows.table, ints([2, 0], DEVICE), values)
    for row, state in zip((2, 0), values, strict=True):
        for unit, value in enumerate(state):
            place = FIRST_UNIT + unit
            page = rows.table[row, FIRST_PAGE + place // PER_PAGE]
            assert torch.equal(rows.pages[page, place % PER_PAGE], value)
    assert rows.written() == values.numel()
    found = gather_states(rows.units, rows.table, ints([0, 1, 2], DEVICE))
    assert torch.equal(found[[2, 0]], values)
    assert found[1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_values_are_rounded_to_the_pages_dtype(dtype: torch.dtype) -> None:
    rows = PagedRows(1, 2, 3, dtype=dtype, device=DEVICE)
    values = torch.randn(1, 2, 3, device=DEVICE)
    scatter_states(rows.units, rows.table, ints([0], DEVICE), values)
    assert torch.equal(rows.states(0), values.to(dtype).cpu())

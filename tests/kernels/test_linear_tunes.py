"""Which constants a product takes."""

import pytest
import torch

from minfer.kernels.linear_tunes import MAX_TOKENS, TABLE, LinearTune, Product, tune_of


def weights(millions: float) -> torch.Tensor:
    return torch.empty(int(millions * 1e6), device="meta")


@pytest.mark.parametrize("product", TABLE)
def test_the_first_row_that_fits_serves(product: Product) -> None:
    for row in TABLE[product]:
        x = torch.empty(row.tokens, row.above + 64, dtype=torch.bfloat16)
        fitting = (
            entry.tune
            for entry in TABLE[product]
            if entry.tokens >= row.tokens
            and entry.millions >= row.millions
            and entry.above <= row.above
        )
        assert tune_of(product, x, weights(row.millions)) == next(fitting)


def test_wide_inputs_have_rows_of_their_own() -> None:
    narrow, wide = (torch.empty(1, n, dtype=torch.bfloat16) for n in (4096, 4097))
    tunes = [tune_of("norm_gated", x, weights(140)) for x in (narrow, wide)]
    assert tunes == [LinearTune(1, 2, 4096, 1, 8, 1), LinearTune(1, 2, 1024, 1, 4, 4)]


def test_large_products_of_wide_inputs_have_rows_of_their_own() -> None:
    """Phi-4's, whose tilings are not those of Qwen2.5 7B."""

    def tune(product: Product, inputs: int, outputs: int) -> LinearTune | None:
        x = torch.empty(8, inputs, dtype=torch.bfloat16)
        return tune_of(product, x, torch.empty(outputs, inputs, device="meta"))

    of_7b = LinearTune(16, 64, 64, 4, 2, 6)
    assert tune("linear_add", 18944, 3584) == of_7b
    assert tune("linear_add", 17920, 5120) not in (of_7b, None)
    assert tune("linear_add", 5120, 5120) is None
    assert tune("norm_gated", 5120, 2 * 17920) == LinearTune(16, 32, 64, 1, 4, 4, True)
    assert tune("norm_gated", 3584, 2 * 18944) == LinearTune(16, 32, 64, 1, 4, 4, True)
    assert tune("norm_gated", 5120, 2 * 13824) == LinearTune(16, 32, 128, 1, 2, 5)


@pytest.mark.parametrize("tokens", [2, 8, 16])
def test_products_of_4096_inputs_have_rows_of_their_own(tokens: int) -> None:
    """Qwen3.5 9B's, and none of them is left to cuBLAS."""

    def tune(product: Product, inputs: int, outputs: int) -> LinearTune | None:
        x = torch.empty(tokens, inputs, dtype=torch.bfloat16)
        return tune_of(product, x, torch.empty(outputs, inputs, device="meta"))

    swapped = LinearTune(16, 64, 128, 2, 8, 3, True)
    assert tune("norm_linear", 4096, 12288) == swapped
    assert tune("norm_linear", 5120, 7680) is None
    assert tune("linear_add", 4096, 4096) == LinearTune(16, 64, 64, 4, 4, 8, True)
    assert tune("norm_gated", 4096, 2 * 12288) == LinearTune(16, 32, 128, 1, 8, 3, True)
    assert tune("linear_add", 12288, 4096) not in (tune("linear_add", 18944, 3584), None)


def test_no_row_is_for_more_tokens() -> None:
    rows = [row for table in TABLE.values() for row in table]
    assert max(row.tokens for row in rows) == MAX_TOKENS
    x = torch.empty(MAX_TOKENS + 1, 64)
    assert all(tune_of(product, x, weights(1)) is None for product in TABLE)


def test_what_tensor_cores_cannot_hold_is_for_cublas() -> None:
    def taken(product: Product, dtype: torch.dtype) -> LinearTune | None:
        return tune_of(product, torch.empty(16, 64, dtype=dtype), weights(100))

    assert taken("linear_add", torch.float16) is not None
    assert taken("linear_add", torch.float32) is None
    assert taken("norm_gated", torch.bfloat16) is not None
    assert taken("norm_gated", torch.float16) is None

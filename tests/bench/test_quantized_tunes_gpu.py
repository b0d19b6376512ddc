"""Tilings of large products are chosen and tried, at toy sizes on the CPU."""

from argparse import Namespace
from pathlib import Path

import pytest

from bench import quantized_tunes_gpu as module
from minfer.kernels.leaves import FP8_BLOCKS, INT8, int4


@pytest.mark.long
def test_tilings_are_right_and_a_stopped_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = Namespace(
        device="cpu",
        schemes=["int4", "int8", "fp8_blocks"],
        tokens=[66],
        limit=1,
        folder=tmp_path,
        name="tunes",
    )
    results = module.measure(args)
    assert len(results) == 3 * len(module.PRODUCTS)
    for name, errors in results.items():
        assert all(error < module.MAX_ERROR for error in errors.values()), name
    monkeypatch.setattr(module, "try_case", None)
    assert module.measure(args) == results


@pytest.mark.parametrize("of", module.PRODUCTS, ids=lambda of: of.name)
@pytest.mark.parametrize("tokens", [64, 512])
def test_tilings_fit_a_processor(of: module.LayerProduct, tokens: int) -> None:
    for scheme in (int4(128), INT8, FP8_BLOCKS):
        tunes = module.tilings(of, tokens, scheme)
        assert 4 < len(tunes) == len(set(tunes)) < 150
        for tune in tunes:
            assert tune.dequantized == (scheme is not INT8)
            lines = tune.columns * (1 + of.gated)
            assert tune.rows * lines <= 128 * 32 * tune.warps
            assert of.inputs % (tune.depth * tune.splits) == 0

"""Libraries' products are compared at toy sizes on the CPU, where others than minfer's
are missing, and a stopped run goes on.
"""

from argparse import Namespace
from pathlib import Path

import pytest

from bench import quantized_libraries_gpu as module
from bench.quantized_tunes_gpu import PRODUCTS


@pytest.mark.long
def test_what_is_missing_is_a_row_and_a_stopped_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries = ["minfer", "bfloat16", "humming", "quack"]
    args = Namespace(
        device="cpu",
        schemes=["int4_zeros", "int8"],
        libraries=libraries,
        rows=[2],
        experts=False,
        folder=tmp_path,
        name="libraries",
    )
    monkeypatch.setattr(module, "PRODUCTS", PRODUCTS[:1])
    results = module.measure(args)
    rows = results["int4_zeros, qkv"]["2 rows"]
    assert [*rows] == ["humming", "quack", "minfer", "bfloat16"]
    assert rows["minfer"]["us"] > 0
    assert 0.05 < rows["minfer"]["error"] < module.MAX_ERROR  # of rounding to 4 bits
    assert "No module named 'humming'" in rows["humming"]["failed"]
    in_8_bits = results["int8, qkv"]["2 rows"]
    assert in_8_bits["minfer"]["error"] < 0.02
    assert "quack" not in in_8_bits
    monkeypatch.setattr(module, "measure_matrix", None)
    assert module.measure(args) == results


def test_every_scheme_has_a_name_in_other_libraries() -> None:
    assert module.HUMMING.keys() == module.SCHEMES.keys()
    assert module.ONLY.keys() <= module.LIBRARIES.keys()

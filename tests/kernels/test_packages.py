"""Which packages can serve, and how those that cannot are named."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minfer.kernels import packages
from minfer.kernels.packages import FLASH, NAMES, QUACK, load, missing


@pytest.mark.parametrize(
    ("package", "holds"), [(FLASH, "cute/__init__.py"), (QUACK, "gemm_interface.py")]
)
def test_why_a_package_cannot_serve(
    package: str, holds: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kind, gpu = torch.bfloat16, torch.device("cuda")
    assert missing(package, kind, torch.device("cpu")).startswith(
        f"{NAMES[package]} is used on H"
    )
    generation = [8]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (generation[0], 0))
    assert "Hopper" in missing(package, kind, gpu)
    generation[0] = 9
    assert "not torch.float32" in missing(package, torch.float32, gpu)
    monkeypatch.setattr(packages, "find_spec", lambda _: None)
    assert "not installed" in missing(package, kind, gpu)
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(packages, "find_spec", lambda _: found)
    assert "not installed" in missing(
        package, kind, gpu
    )  # another package of this name, or older
    (tmp_path / holds).parent.mkdir(exist_ok=True)
    (tmp_path / holds).touch()
    assert missing(package, kind, gpu) == ""


@pytest.mark.parametrize("package", [FLASH, QUACK])
def test_a_broken_package_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, says in (
        (None, f"{NAMES[package]} is not importable"),
        (SimpleNamespace(), ""),
    ):
        load.cache_clear()
        monkeypatch.setitem(sys.modules, package, module)
        assert load(package).partition(":")[0] == says
    load.cache_clear()

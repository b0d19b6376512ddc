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
    folder = tmp_path / "site-packages" / "package"
    spec = SimpleNamespace(submodule_search_locations=[str(folder)])
    monkeypatch.setattr(packages, "find_spec", lambda _: spec)
    # Another package of this name, or an older one.
    assert "not installed" in missing(package, kind, gpu)
    (folder / holds).parent.mkdir(parents=True)
    (folder / holds).touch()
    assert missing(package, kind, gpu) == ""


def test_quack_needs_cutlass_where_packages_are_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    places = {"quack": tmp_path / "quack", "cutlass": tmp_path / "cutlass"}
    places["quack"].mkdir()
    (places["quack"] / "gemm_interface.py").touch()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(
        packages,
        "find_spec",
        lambda top: SimpleNamespace(submodule_search_locations=[str(places[top])]),
    )
    arguments = QUACK, torch.bfloat16, torch.device("cuda")
    assert f"not in {places['cutlass']}" in missing(*arguments)
    for folder in ("site-packages", "dist-packages"):
        places["cutlass"] = tmp_path / folder / "cutlass"
        assert missing(*arguments) == ""


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

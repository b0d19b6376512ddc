"""What launches kernels, built where there is no GPU."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from triton.backends.nvidia import driver as nvidia
from triton.runtime import build

from minfer.kernels import launchers

with_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a compiler")


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A version of Triton that builds a launcher for each signature."""
    made = list[Any]()

    def launcher(src: str, metadata: str) -> None:
        places = [Path(place) for place in nvidia.library_dirs()]
        assert (places[-1] / launchers.LIBRARY).stat().st_size > 0
        assert build._load_module_from_path("name", "path").launch is None
        made.append((src, metadata))

    monkeypatch.setattr(nvidia, "make_launcher", None, raising=False)
    monkeypatch.setattr(nvidia, "CudaLauncher", launcher)
    monkeypatch.setattr(launchers, "_build_utilities", made.append)
    return made


KERNELS = [SimpleNamespace(src=name, metadata="how") for name in "ab"]


@with_compiler
def test_each_is_linked_with_an_empty_library(built: list[Any]) -> None:
    before = nvidia.library_dirs, build._load_module_from_path
    assert launchers.build_launchers(KERNELS) == ""
    assert sorted(built[:-1]) == [("a", "how"), ("b", "how")]
    assert (nvidia.library_dirs, build._load_module_from_path) == before


def test_without_a_compiler_it_says_so(
    built: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    assert "cc" in launchers.build_launchers(KERNELS)
    assert not built


def test_later_versions_need_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(nvidia, "make_launcher", raising=False)
    assert launchers.build_launchers([object()]) == ""

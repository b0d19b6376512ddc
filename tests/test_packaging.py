"""What is built and installed: a wheel with all of minfer, of the checkout and of the
source distribution alike, and a source distribution with which one can go on working.

Nothing is downloaded, so the build backend has to be installed: `pip install '.[dev]'`
does that.
"""

import re
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

import minfer

ROOT: Final = Path(__file__).resolve().parents[1]
NAME: Final = f"minfer-{minfer.__version__}"
ROOMS: Final = ("minfer", "effects", "kernels", "bench", "tests")
WEIGHTS: Final = ".safetensors"  # only where they are read
DEPLOY: Final = "minfer/effects/deploy/"  # used from a clone or a source distribution
# Kinds of files that run: code, and data that it reads.
KINDS: Final = (
    "*.py", "py.typed", "*.json", "*.safetensors", "*.jinja", "*.html", "*.css", "*.js",
)  # fmt: skip

pytestmark = pytest.mark.skipif(
    find_spec("hatchling") is None,
    reason="the build backend is not installed: pip install hatchling",
)


def build(target: str, tree: Path, into: Path) -> Path:
    """Build a `target` (sdist or wheel) of a tree; returns the file."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(into)]
    subprocess.run(command, cwd=tree, check=True, capture_output=True)
    (built,) = into.iterdir()
    return built


def files_of(room: str) -> set[str]:
    """Files of a room that run, by their path from the root."""
    paths = (path for kind in KINDS for path in (ROOT / room).rglob(kind))
    return {
        str(path.relative_to(ROOT)) for path in paths if "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of this checkout, unpacked."""
    archive_path = build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))
    into = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(archive_path) as archive:
        archive.extractall(into, filter="data")
    return into / NAME


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.long
def test_the_source_distribution_is_whole(sdist: Path) -> None:
    for room in ROOMS:
        for name in files_of(room):
            if room == "minfer" or not name.endswith(WEIGHTS):
                assert (sdist / name).read_bytes() == (ROOT / name).read_bytes(), name
    assert {path.parents[3].name for path in sdist.rglob(f"*{WEIGHTS}")} == {"minfer"}
    for linked in ("effects", "kernels"):
        for name in files_of(linked):
            assert (sdist / "minfer" / name).is_file(), f"minfer/{name}"
    deploy = (ROOT / "effects" / "deploy").iterdir()
    deploy_files = (str(path.relative_to(ROOT)) for path in deploy)
    others = (".ci/run", ".ci/hatch_hooks.py", ".github/CONTRIBUTING.md")
    for name in ("pyproject.toml", "README.md", "LICENSE", *others, *deploy_files):
        assert (sdist / name).is_file(), name


@pytest.mark.long
def test_a_wheel_has_all_that_runs_and_nothing_beside(
    sdist: Path, tmp_path: Path
) -> None:
    of_checkout = contents(build("wheel", ROOT, tmp_path / "one"))
    of_sdist = contents(build("wheel", sdist, tmp_path / "two"))
    assert of_checkout == of_sdist
    expected = files_of("minfer")
    for linked in ("effects", "kernels"):
        expected |= {f"minfer/{name}" for name in files_of(linked)}
    expected = {name for name in expected if not name.startswith(DEPLOY)}
    assert expected <= of_checkout.keys()
    assert not [name for name in of_checkout if name.startswith(DEPLOY)]
    tops = {name.split("/")[0] for name in of_checkout}
    assert tops == {"minfer", f"{NAME}.dist-info"}
    entry = of_checkout[f"{NAME}.dist-info/entry_points.txt"].decode()
    assert "minfer = minfer.effects.cli.main:main" in entry
    metadata = of_checkout[f"{NAME}.dist-info/METADATA"].decode()
    assert f"\nVersion: {minfer.__version__}\n" in metadata
    links = re.findall(r"\]\(([^)]*)", metadata)
    assert links == [link for link in links if link.startswith("https:")]
    assert "## Supported" in metadata


@pytest.mark.long
def test_an_editable_installation_has_minfer_and_nothing_beside_on_its_path(
    tmp_path: Path,
) -> None:
    wheels = pytest.importorskip("hatchling.builders.wheel")
    (built,) = wheels.WheelBuilder(str(ROOT)).build(
        directory=str(tmp_path), versions=["editable"]
    )
    with zipfile.ZipFile(built) as wheel:
        (pth,) = [name for name in wheel.namelist() if name.endswith(".pth")]
        folder = Path(wheel.read(pth).decode().strip())
    assert [path.name for path in folder.iterdir()] == ["minfer"]
    assert (folder / "minfer").resolve() == ROOT / "minfer"
    assert (folder / "minfer" / "effects" / "cli" / "main.py").is_file()

"""What is compiled ahead, without a GPU, is what launches look for; test_gpu.py has the
rest.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minfer.kernels.ahead import settle

LISTING = "__grp__product.json"
Told = dict[str, Any]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What tests/kernels/cached.py says."""
    folder = tmp_path_factory.mktemp("cached")
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.cached", str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found: Told = json.loads(done.stdout.splitlines()[-1])
    return found


def test_launches_find_on_disk_what_was_compiled_without_a_gpu(told: Told) -> None:
    assert told["hits"] == [True] * 4
    assert told["others"] == [False] * 2  # another kind of GPU needs its own


def test_each_is_noted_and_compiled_once(told: Told) -> None:
    names = ["minfer.kernels.rows._scatter", "minfer.kernels.activation._silu_mul"]
    assert told["found"] == [[name, pdl] for pdl in (True, False) for name in names]
    assert (told["divisible"], told["constants"]) == (["arena", "pairs"], {"block": 256})
    assert told["made"] == [4, 4, []]
    assert told["told"] == [[done, 4] for done in (1, 2, 3, 4)]
    assert told["kernels"] == [True] * 4
    assert told["again"] == [4, 0, []]


def test_one_that_cannot_be_compiled_is_named_and_hinders_no_other(told: Told) -> None:
    compiled, [failed] = told["bad"]
    assert compiled == 0  # the other one is on disk
    assert failed.startswith("minfer.kernels.rows._scatter: KeyError")


def write_entry(folder: Path, listed: Path) -> Path:
    """A key's folder whose files are said to be in another."""
    folder.mkdir(parents=True)
    names = ("product.cubin", "product.json")
    for name in names:
        (folder / name).write_text(name)
    listing = folder / LISTING
    files = {name: str(listed / name) for name in names}
    listing.write_text(json.dumps({"child_paths": files}))
    return listing


def test_a_moved_cache_is_settled_once(tmp_path: Path, told: Told) -> None:
    assert told["settled"] == [4, 0]
    listing = write_entry(tmp_path / "KEY", tmp_path / "elsewhere")
    assert settle(tmp_path) == 1
    files = json.loads(listing.read_text())["child_paths"]
    assert files == {name: str(tmp_path / "KEY" / name) for name in files}
    assert sorted(file.name for file in listing.parent.iterdir()) == sorted(
        [*files, LISTING]
    )


def test_what_is_whole_or_incomplete_or_broken_is_left_alone(tmp_path: Path) -> None:
    whole = write_entry(tmp_path / "WHOLE", tmp_path / "WHOLE")
    incomplete = write_entry(tmp_path / "INCOMPLETE", tmp_path / "elsewhere")
    (incomplete.parent / "product.cubin").unlink()
    broken = write_entry(tmp_path / "BROKEN", tmp_path / "elsewhere")
    broken.write_text("{")
    before = [one.read_text() for one in (whole, incomplete, broken)]
    assert settle(tmp_path) == 0
    assert [one.read_text() for one in (whole, incomplete, broken)] == before
    assert settle(tmp_path / "nothing") == 0

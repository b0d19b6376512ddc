"""Kernels are compiled without running, and found on disk the next time."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What tests/kernels/cached.py prints."""
    folder = tmp_path_factory.mktemp("cache")
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.cached", str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.long
def test_each_combination_is_compiled_once_and_loaded(found: dict[str, Any]) -> None:
    wanted, compiled, failed, loaded = found["first"]
    assert wanted == compiled == len(loaded) >= 3
    assert {*loaded} == {"_scatter", "_gated_mul"}
    assert not failed
    assert found["progress"][:wanted] == [*range(1, wanted + 1)]


def test_the_next_process_finds_them_on_disk(found: dict[str, Any]) -> None:
    wanted, compiled, failed, loaded = found["second"]
    assert [wanted, loaded] == [found["first"][0], found["first"][3]]
    assert (compiled, failed) == (0, [])


def test_a_kernel_that_cannot_be_compiled_is_named_and_stops_none(
    found: dict[str, Any],
) -> None:
    wanted, loaded, [failed] = found["wrong"]
    assert "no_such_thing" in failed
    assert (wanted, sorted(loaded)) == (3, ["_gated_mul", "_scatter"])

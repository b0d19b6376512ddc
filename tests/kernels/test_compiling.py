"""Kernels are compiled without running, and found on disk the next time."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What tests/kernels/cached.py prints."""
    folder = tmp_path_factory.mktemp("cache")
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.cached", str(folder)]
    process = subprocess.run(command, env=env, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-4000:]
    result: dict[str, Any] = json.loads(process.stdout)
    return result


@pytest.mark.long
def test_each_combination_is_compiled_once_and_loaded(report: dict[str, Any]) -> None:
    num_requested, compiled, failed, loaded = report["first"]
    assert num_requested == compiled == len(loaded) >= 3
    assert {*loaded} == {"_scatter", "_gated_mul"}
    assert not failed
    assert report["progress"][:num_requested] == [*range(1, num_requested + 1)]


def test_the_next_process_finds_them_on_disk(report: dict[str, Any]) -> None:
    num_requested, compiled, failed, loaded = report["second"]
    assert [num_requested, loaded] == [report["first"][0], report["first"][3]]
    assert (compiled, failed) == (0, [])


def test_a_kernel_that_cannot_be_compiled_is_named_and_stops_none(
    report: dict[str, Any],
) -> None:
    num_requested, loaded, [failed] = report["wrong"]
    assert "no_such_thing" in failed
    assert (num_requested, sorted(loaded)) == (3, ["_gated_mul", "_scatter"])


def test_where_none_can_be_written_those_on_disk_are_used_and_others_kept(
    report: dict[str, Any],
) -> None:
    """A spare folder has what was compiled, for the next process as well."""
    first, second = report["spare"]
    assert first == [0, 1, []]
    assert second == [0, 0, []]


def test_what_is_compiled_is_watched(report: dict[str, Any]) -> None:
    compiled = report["first"][1] + report["second"][1]
    assert len(report["watched"]) == compiled + 1  # in a spare folder
    assert {*report["watched"]} == {"_scatter", "_gated_mul"}

"""`minfer compile`: what it says, and that serving finds what it made."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from triton import knobs

from minfer.effects.cli.compile import capability_of
from minfer.effects.cli.errors import BAD_INPUT
from minfer.effects.cli.main import main
from minfer.effects.execution import needs
from minfer.kernels import ahead, launchers
from tests.circles import long
from tests.effects.tiny_model import write_checkpoint

SMALL = ["--block-size", "8", "--max-num-seqs", "4", "--max-num-batched-tokens", "64"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was asked of the compiler, which compiles nothing."""
    found = list[Any]()

    def needed(spec: Any, config: Any, target: tuple[int, int]) -> list[str]:
        found.append((spec.dtype, config.max_num_seqs, target))
        return ["a", "b", "c"]

    def make(
        wanted: list[str], *, target: tuple[int, int], told: Callable[[int, int], None]
    ) -> ahead.Made:
        told(1, 3)
        failed = ("c: no such thing",) if target == (8, 0) else ()
        return ahead.Made(len(wanted), 2, 1.25, failed, ("kernels",))

    monkeypatch.setattr(knobs.runtime, "interpret", False)
    monkeypatch.setattr(needs, "needed", needed)
    monkeypatch.setattr(ahead, "make", make)
    monkeypatch.setattr(launchers, "build_launchers", lambda _: "")
    monkeypatch.setenv("TRITON_CACHE_DIR", "of this test")  # which the command changes
    return found


def test_it_says_what_it_made_for_each_target(
    folder: Path, tmp_path: Path, asked: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_bytes(bytes(2048))
    command = ["compile", "--model", str(folder), *SMALL, "--output", str(tmp_path)]
    command += ["--dtype", "bfloat16", "--target", "sm_90", "sm_100a"]
    assert main(command) == 0
    assert asked == [("bfloat16", 4, (9, 0)), ("bfloat16", 4, (10, 0))]
    out = capsys.readouterr().out
    said = "3 kernels are needed, 2 of them were compiled in 1.2 s, 2.00 KiB in"
    assert f"sm_90: {said} {tmp_path}" in out
    assert f"sm_100: {said} {tmp_path}" in out
    assert "the same engine settings" in out


def test_what_was_not_compiled_is_said_and_counts(
    folder: Path,
    asked: list[Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(launchers, "build_launchers", lambda _: "there is no cc")
    command = ["compile", "--model", str(folder), *SMALL, "--output", str(tmp_path)]
    assert main([*command, "--target", "sm_90", "sm80"]) == 1
    assert [target for *_, target in asked] == [(9, 0), (8, 0)]
    said = capsys.readouterr().err
    assert "not compiled: c: no such thing" in said
    assert "a C compiler is needed at start: there is no cc" in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "there is no GPU here: say which one is meant"),
        (["--target", "sm_90", "--device", "cpu"], "nothing is compiled for the CPU"),
        (["--target", "sm_90", "--model", "nowhere/at/all"], "nowhere/at/all"),
    ],
)
def test_what_cannot_be_is_one_line(
    folder: Path,
    asked: list[Any],
    arguments: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["compile", "--model", str(folder), *arguments]) == BAD_INPUT
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert not asked


@pytest.mark.parametrize("name", ["90", "sm_", "sm_9x", "hopper", "sm_75", "sm_9"])
def test_targets_that_are_none_are_named(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["compile", "--target", name])
    assert name in capsys.readouterr().err


def test_a_capability_by_its_name() -> None:
    names = ("sm_80", "sm89", "sm_90a", "sm_100", "sm_120")
    found = [capability_of(name) for name in names]
    assert found == [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)]


def test_an_interpreter_compiles_nothing(
    folder: Path,
    asked: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(knobs.runtime, "interpret", True)
    assert main(["compile", "--model", str(folder), "--target", "sm_90"]) == BAD_INPUT
    assert "TRITON_INTERPRET" in capsys.readouterr().err
    assert not asked


@pytest.mark.parametrize("target", long(["sm_80", "sm_90"]))
def test_a_second_time_all_of_it_is_there(
    folder: Path, tmp_path: Path, target: str
) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "minfer", "compile", *SMALL]
    command += ["--model", str(folder), "--target", target, "--output", str(tmp_path)]
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    said = list[str]()
    for _ in range(2):
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        said.append(done.stdout)
    count = int(said[0].split()[1])
    assert count > 20
    assert f"{count} kernels are needed, {count} of them were compiled" in said[0]
    assert f"{count} kernels are needed, 0 of them were compiled" in said[1]
    listings = [*tmp_path.glob("*/__grp__*.json")]
    assert len(listings) == count
    for listing in listings:
        files = json.loads(listing.read_text())["child_paths"]
        assert any(name.endswith(".cubin") for name in files)

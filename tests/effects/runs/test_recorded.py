"""Of a folder each run, or the latest."""

from pathlib import Path

import pytest

from minfer.effects.cli.main import main
from minfer.effects.live.journal.journal_files import RunFiles, runs_in, write_journal
from minfer.effects.runs.recorded import UNUSABLE, latest, read_each
from minfer.journal.format import JournalError
from tests.core.simulation.test_fork import recorded

NAMES = ("20260101T000000Z-1.0", "20260102T000000Z-1.0")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two runs."""
    journal, turns = recorded(1)
    for name, count in zip(NAMES, (40, 60), strict=True):
        path = tmp_path / f"{name}-000001.journal"
        write_journal(path, journal.config, turns[:count])
    return tmp_path


def count(run: RunFiles) -> int:
    return sum(1 for _ in run.open().turns())


def damage(folder: Path, name: str) -> None:
    path = folder / f"{name}-000001.journal"
    data = path.read_bytes()
    path.write_bytes(data[:2000] + b"????" + data[2004:])


def test_each_run_in_order(folder: Path) -> None:
    assert tuple(run.name for run in runs_in(folder)) == NAMES
    assert read_each(runs_in(folder), count) == ([40, 60], 0)


def test_the_latest_is_named_if_there_are_others(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = latest(folder)
    message = f"minfer: {folder}: this is the latest of its 2 runs, {NAMES[1]}\n"
    assert (run.name, capsys.readouterr().err) == (NAMES[1], message)
    (file,) = run.files
    assert latest(file).files == run.files
    assert capsys.readouterr().err == ""


def test_an_unusable_run_is_reported_and_the_others_are_read(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(folder, NAMES[0])
    assert read_each(runs_in(folder), count) == ([60], UNUSABLE)
    assert "is damaged" in capsys.readouterr().err
    damage(folder, NAMES[1])
    with pytest.raises(JournalError, match="is damaged"):
        read_each(runs_in(folder), count)
    assert capsys.readouterr().err.count("is damaged") == 1


@pytest.mark.parametrize(
    "command",
    [
        ("replay", "--at", "9"),
        ("replay", "--until", "9"),
        ("replay", "--num-blocks", "30"),
        ("view", "-o", "page.html"),
        ("simulate",),
    ],
)
def test_what_is_of_one_run_says_which(
    folder: Path,
    command: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    assert main([command[0], str(folder), *command[1:]]) == 0
    assert f"the latest of its 2 runs, {NAMES[1]}\n" in capsys.readouterr().err

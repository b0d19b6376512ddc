"""Epochs of the prefix cache, in the folder that its blocks are kept in."""

import errno
import json
import os
from pathlib import Path

import pytest

from minfer.effects.execution.tiers.folder_epochs import (
    FILE_NAME,
    LOCK_NAME,
    MAX_FILE_BYTES,
    FolderEpochs,
)
from minfer.values.checks import ConfigError
from tests.effects.execution.strange_files import STRANGE


def test_a_reset_is_seen_by_all_engines_and_after_restarts(tmp_path: Path) -> None:
    (tmp_path / "new" / "folder" / "lost+found").mkdir(parents=True)
    epochs = FolderEpochs.open(tmp_path / "new" / "folder")
    two = FolderEpochs.open(epochs.folder)
    first = epochs.of_all
    assert first == two.of_all > 0
    assert epochs.of_tenant("a") == 0
    epochs.raise_all()
    two.raise_tenant("a")
    epochs.raise_tenant("b")
    all_epochs = {
        (epoch.of_all, epoch.of_tenant("a"), epoch.of_tenant("b"))
        for epoch in (epochs, two)
    }
    reopened = FolderEpochs.open(epochs.folder)
    [now] = all_epochs | {
        (reopened.of_all, reopened.of_tenant("a"), reopened.of_tenant("b"))
    }
    assert len({first, *now, 0}) == 5
    assert "a" not in json.loads((epochs.folder / FILE_NAME).read_text())["tenants"]


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "{}",
        '{"format": 1, "epoch": 0, "tenants": {}}',
        "[1]",
        "[" * 10**6,
        '{"tenants":' * 10**5 + "1" + "}" * 10**5,
        '{"format": 1, "epoch": ' + "9" * 5000 + ', "tenants": {}}',
        '{"format": 1, "epoch": 5, "tenants": {}}' + " " * MAX_FILE_BYTES,
    ],
    ids=lambda text: "none" if text is None else f"{text[:10]}... {len(text)}",
)
def test_a_lost_file_makes_all_unfindable(tmp_path: Path, text: str | None) -> None:
    """Never an epoch that was there before."""
    epochs = FolderEpochs.open(tmp_path)
    before, file = epochs.of_all, tmp_path / FILE_NAME
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    assert epochs.of_all not in (0, before)
    assert FolderEpochs.open(tmp_path).of_all == epochs.of_all
    file.unlink()
    two = FolderEpochs.open(tmp_path)
    assert epochs.of_all == two.of_all
    assert epochs.of_all not in (0, before)


@pytest.mark.parametrize("name", [FILE_NAME, LOCK_NAME])
@pytest.mark.parametrize("kind", STRANGE)
def test_what_stands_in_place_of_a_file_is_named_at_the_start(
    tmp_path: Path, kind: str, name: str
) -> None:
    STRANGE[kind](tmp_path / name)
    with pytest.raises(ConfigError, match=f"{tmp_path / name} is not a regular file"):
        FolderEpochs.open(tmp_path)


@pytest.mark.parametrize("kind", sorted({*STRANGE, "file"} - {"folder", "full folder"}))
def test_what_stands_in_place_of_a_subfolder_is_named_at_the_start(
    tmp_path: Path, kind: str
) -> None:
    FolderEpochs.open(tmp_path)
    {**STRANGE, "file": Path.touch}[kind](tmp_path / "a7")
    with pytest.raises(ConfigError, match=f"{tmp_path / 'a7'} is not a folder"):
        FolderEpochs.open(tmp_path)


@pytest.mark.parametrize("name", [FILE_NAME, LOCK_NAME])
@pytest.mark.parametrize("kind", STRANGE)
def test_what_stands_in_place_of_a_file_later_stops_nothing(
    tmp_path: Path, kind: str, name: str
) -> None:
    """It is replaced where it can be; else this engine's own epochs go on."""
    epochs = FolderEpochs.open(tmp_path)
    before = epochs.of_all
    (tmp_path / name).unlink()
    STRANGE[kind](tmp_path / name)
    replaced = name == FILE_NAME and "folder" not in kind
    assert (epochs.of_all != before) is replaced
    if not replaced:
        with pytest.raises(OSError, match=name):
            epochs.raise_all()


def test_a_folder_is_opened_again_on_a_disk_that_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an engine that dies meanwhile could not be started again."""
    before = FolderEpochs.open(tmp_path).of_all

    def full(path: Path, _: str) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    epochs = FolderEpochs.open(tmp_path)
    assert epochs.of_all == before
    with pytest.raises(OSError, match="No space left"):
        epochs.raise_all()
    assert not list(tmp_path.glob("*.part"))
    (tmp_path / FILE_NAME).unlink()
    with pytest.raises(ConfigError, match="No space left"):
        FolderEpochs.open(tmp_path)


def test_what_cannot_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        FolderEpochs.open(file)
    with pytest.raises(ConfigError, match=r"other files .'file'"):
        FolderEpochs.open(tmp_path)
    file.unlink()
    (tmp_path / FILE_NAME).write_text('{"format": 2}')
    with pytest.raises(ConfigError, match=r"another version of minfer .format 2"):
        FolderEpochs.open(tmp_path)
    (tmp_path / FILE_NAME).unlink()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, os.strerror(30))

    epochs = FolderEpochs.open(tmp_path)
    before = epochs.of_all
    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(ConfigError, match="Read-only"):
        FolderEpochs.open(tmp_path)
    with pytest.raises(OSError, match="Read-only"):
        epochs.raise_all()
    assert epochs.of_all == before

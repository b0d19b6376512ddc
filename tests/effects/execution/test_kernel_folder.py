"""Where compiled kernels are kept if their folder cannot be written."""

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minfer.effects.execution.warming import kernel_folder
from minfer.effects.execution.warming.kernel_folder import (
    MIN_FREE_BYTES,
    prepare_kernel_folder,
    write_problem,
)
from minfer.values.checks import ConfigError


class TritonFolder:
    """Triton's setting of its folder."""

    def __init__(self, folder: Path) -> None:
        self.cache = SimpleNamespace(
            dir=str(folder), get_triton_dir=lambda name: str(folder.parent / name)
        )

    @property
    def folder(self) -> Path:
        return Path(self.cache.dir)


@pytest.fixture
def triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TritonFolder:
    """A cache with a kernel, half of another one, and one that was moved here."""
    knobs = TritonFolder(tmp_path / "cache")
    for name in ("whole", "part", "moved"):
        (knobs.folder / name).mkdir(parents=True)
        (knobs.folder / name / "attend.ttir").touch()
    for name, written_in in (("whole", knobs.folder), ("moved", tmp_path / "earlier")):
        paths = {"attend.ttir": str(written_in / name / "attend.ttir")}
        group = json.dumps({"child_paths": paths})
        (knobs.folder / name / "__grp__attend.json").write_text(group)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("triton.knobs.cache", knobs.cache)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(kernel_folder, "SHARED_MEMORY", str(tmp_path / "shm"))
    return knobs


def full_disk(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    """Fail to write to these folders, as a disk without room does."""
    inner: Callable[..., Any] = tempfile.NamedTemporaryFile

    def named(**options: Any) -> Any:
        if any(options["dir"].is_relative_to(folder) for folder in folders):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return inner(**options)

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", named)


def test_a_folder_that_can_be_written_stays(
    triton: TritonFolder, caplog: pytest.LogCaptureFixture
) -> None:
    before = triton.folder
    prepare_kernel_folder()
    assert triton.folder == before
    assert not caplog.messages
    assert {path.name for path in before.iterdir()} == {"whole", "part", "moved"}


def test_a_spare_folder_has_what_a_full_disk_has(
    triton: TritonFolder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    full = triton.folder
    full_disk(monkeypatch, full)
    prepare_kernel_folder()
    assert triton.folder.parent == Path(tempfile.gettempdir())
    assert triton.folder.stat().st_mode & 0o077 == 0
    assert [path.name for path in triton.folder.iterdir()] == ["whole"]
    assert (triton.folder / "whole" / "__grp__attend.json").exists()
    [message] = caplog.messages
    assert f"cannot be kept in {full}: No space left on device. 1 that are" in message
    assert "10 to 30 s of each start. Set TRITON_CACHE_DIR" in message
    # The next start, after what it links to has gone.
    shutil.rmtree(full)
    triton.cache.dir = str(full)
    prepare_kernel_folder()
    assert [*triton.folder.iterdir()] == []


def test_a_folder_that_cannot_be_made_is_none(
    triton: TritonFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    triton.cache.dir = str(tmp_path / "file" / "cache")
    prepare_kernel_folder()
    assert triton.folder.is_relative_to(tmp_path / "tmp")
    assert "Not a directory. 0 that are there" in caplog.messages[0]


def test_an_empty_name_is_as_none(triton: TritonFolder) -> None:
    """Triton would fail at each kernel."""
    folder, triton.cache.dir = triton.folder, ""
    prepare_kernel_folder()
    assert triton.folder == folder


def test_without_a_temporary_folder_there_is_shared_memory(
    triton: TritonFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_disk(monkeypatch, triton.folder)
    (tmp_path / "shm").mkdir()

    def gettempdir() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", gettempdir)
    prepare_kernel_folder()
    assert triton.folder.is_relative_to(tmp_path / "shm")


def test_two_processes_may_remove_the_same_link(
    triton: TritonFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, is_complete = triton.folder, kernel_folder._is_complete
    full_disk(monkeypatch, full)
    prepare_kernel_folder()
    shutil.rmtree(full)
    [link] = triton.folder.iterdir()

    def removed(kernel: Path) -> bool:
        link.unlink(missing_ok=True)  # by the other process
        return is_complete(kernel)

    monkeypatch.setattr(kernel_folder, "_is_complete", removed)
    triton.cache.dir = str(full)
    prepare_kernel_folder()
    assert not link.is_symlink()


def test_a_link_to_a_kernel_that_was_moved_is_removed(
    triton: TritonFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = triton.folder
    full_disk(monkeypatch, full)
    prepare_kernel_folder()
    shutil.copy(full / "moved" / "__grp__attend.json", full / "whole")
    triton.cache.dir = str(full)
    prepare_kernel_folder()
    assert [*triton.folder.iterdir()] == []


@pytest.mark.skipif(os.getuid() == 0, reason="root can write everywhere")
def test_neither_is_a_folder_without_permission(triton: TritonFolder) -> None:
    triton.folder.chmod(0o500)
    assert write_problem(triton.folder) == "Permission denied"
    triton.folder.chmod(0o700)


def test_a_disk_that_is_nearly_full_is_none(
    triton: TritonFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = SimpleNamespace(free=MIN_FREE_BYTES - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: few)
    assert write_problem(triton.folder) == (
        "255 MiB are free there, and kernels may take 256"
    )


def test_a_folder_that_others_can_write_is_no_spare_one(
    triton: TritonFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others could leave code there."""
    full_disk(monkeypatch, triton.folder)
    (tmp_path / "shm").mkdir()
    prepare_kernel_folder()
    spare, cache = triton.folder, tmp_path / "cache"
    spare.chmod(0o777)
    triton.cache.dir = str(cache)
    prepare_kernel_folder()
    assert triton.folder.is_relative_to(tmp_path / "shm")
    shutil.rmtree(spare)
    spare.symlink_to(tmp_path)
    (tmp_path / "shm" / spare.name).chmod(0o750)
    triton.cache.dir = str(cache)
    with pytest.raises(ConfigError) as raised:
        prepare_kernel_folder()
    assert str(raised.value) == (
        f"compiled kernels cannot be written anywhere ({cache}: No space left on device; "
        f"{spare}: other users have access to it; {tmp_path / 'shm' / spare.name}: other "
        "users have access to it): set TRITON_CACHE_DIR to a folder that can be written"
    )

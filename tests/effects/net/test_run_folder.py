"""Folders of servers: gone at the end, and those of the killed with the next start."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from minfer.effects.net.run_folder import folder_path, run_folder


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def there(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


KILLED = """
import os, signal
from minfer.effects.net.run_folder import run_folder

with run_folder() as folder:
    if not os.fork():  # it outlives its parent
        print(os.getpid(), folder, flush=True)
        signal.pause()
    os.waitid(os.P_ALL, 0, os.WEXITED)
"""


def test_it_is_gone_at_the_end(place: Path) -> None:
    with run_folder() as folder:
        (folder / "engine").touch()
        assert there(place) == [folder.name]
    assert there(place) == []


def test_what_the_killed_left_is_removed_once_the_last_of_them_has_gone(
    place: Path,
) -> None:
    command = [sys.executable, "-c", KILLED]
    env = {**os.environ, "TMPDIR": str(place)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        child, folder = process.stdout.readline().split()
        left = Path(folder)
        process.kill()
        process.wait()
        with run_folder():
            assert left.exists(), "its child uses it still"
        os.kill(int(child), signal.SIGKILL)
    end = time.monotonic() + 10
    while left.exists():  # the child takes a moment to go
        assert time.monotonic() < end
        with run_folder():
            pass
    assert there(place) == []


def test_folders_of_others_stay(place: Path) -> None:
    (place / "minfer-verify-1").mkdir()
    other_folder = place / "mine"
    other_folder.mkdir()
    (other_folder / "lock").touch()
    (place / "minfer-link").symlink_to(other_folder)
    (place / "minfer-file").touch()
    before = there(place)
    with run_folder():
        pass
    assert there(place) == before
    assert (other_folder / "lock").exists()


def test_two_servers_keep_each_others_folders(place: Path) -> None:
    with run_folder() as first, run_folder() as second:
        assert there(place) == sorted([first.name, second.name])


def test_a_folder_with_a_name_is_made_once(place: Path) -> None:
    with run_folder("x") as folder:
        assert folder == folder_path("x") == place / "minfer-x"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        with pytest.raises(FileExistsError), run_folder("x"):
            pass
        assert (folder / "lock").exists(), "it is still in use"
    with run_folder("x"):
        pass
    assert there(place) == []

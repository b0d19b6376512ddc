"""The folder for the sockets of the processes of one server or engine, while they run.

Only processes of this user reach what is in it, as its mode is 0700.

A process that is killed removes nothing. So the process that makes the folder, and with
it all its forks, holds a lock on it: one without a lock was left behind, and the next
server that starts removes it.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from minfer.values.checks import ConfigError

_PREFIX: Final = "minfer-"
_LOCK_NAME: Final = "lock"
_MAX_SOCKET_PATH_BYTES: Final = 100  # bytes of a socket's path; systems know 104 or 108


@contextlib.contextmanager
def run_folder(name: str = "") -> Iterator[Path]:
    """A new folder, removed at the end; removes folders left behind by killed servers.
    With a name, it is the one at `folder_path(name)`, which other processes can find.
    Raises FileExistsError if that is there: another user's, or still in use.
    """
    for old_folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        _remove_if_abandoned(old_folder)
    if name:
        folder = folder_path(name)
        folder.mkdir(mode=0o700)
    else:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        lock = _lock_folder(folder)
        try:
            yield folder
        finally:
            os.close(lock)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def folder_path(name: str) -> Path:
    """The path of the run folder with a name."""
    return Path(tempfile.gettempdir()) / f"{_PREFIX}{name}"


def check_private(folder: Path) -> None:
    """Raise PermissionError for a folder that other users made or can write to, as all
    can make one in the folder for temporary files; and OSError if there is none.
    """
    status = folder.lstat()
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not is_own or stat.S_IMODE(status.st_mode) & 0o077:
        raise PermissionError(
            f"{folder} is no folder of this user alone (mode 0700); remove it, or set "
            f"TMPDIR to a folder of this user"
        )


def socket_paths(folder: Path, replicas: int) -> list[Path]:
    """The paths of the engines' sockets, each in a folder of its own if there are
    several. Raises ConfigError if they are too long.
    """
    numbers = range(replicas)
    folders = [folder] if replicas == 1 else [folder / str(number) for number in numbers]
    for engine_folder in folders:
        engine_folder.mkdir(exist_ok=True)
    paths = [engine_folder / "engine" for engine_folder in folders]
    if len(os.fsencode(paths[-1])) > _MAX_SOCKET_PATH_BYTES:
        raise ConfigError(f"{paths[-1]}: too long a path for a socket; shorten TMPDIR")
    return paths


def _lock_folder(folder: Path) -> int:
    """Lock a folder; returns the file that holds the lock until all copies are closed."""
    unlocked_path = folder / f"{_LOCK_NAME}.part"
    file = os.open(unlocked_path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)
    unlocked_path.rename(folder / _LOCK_NAME)  # never there without a lock
    return file


def _remove_if_abandoned(folder: Path) -> None:
    """Remove a folder of this user if no process holds its lock."""
    with contextlib.suppress(OSError):  # another user's, locked, or gone by now
        status = folder.lstat()
        if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
            return
        file = os.open(folder / _LOCK_NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(file)

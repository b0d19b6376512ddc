"""The folder for the sockets of one server's processes, while they run.

A process that is killed removes nothing. So the server, and with it all its forks, holds
a lock on the folder: one without a lock was left behind, and the next server that starts
removes it.
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
_LOCK: Final = "lock"
_LONGEST: Final = 100  # bytes of a socket's path; systems know 104 or 108


@contextlib.contextmanager
def run_folder() -> Iterator[Path]:
    """A new folder, removed at the end; removes folders left behind by killed servers."""
    for one in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        _remove_if_left(one)
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as name:
        lock = _lock_folder(Path(name))
        try:
            yield Path(name)
        finally:
            os.close(lock)


def socket_paths(folder: Path, replicas: int) -> list[Path]:
    """The paths of the engines' sockets, each in a folder of its own if there are
    several. Raises ConfigError if they are too long.
    """
    numbers = range(replicas)
    folders = [folder] if replicas == 1 else [folder / str(one) for one in numbers]
    for one in folders:
        one.mkdir(exist_ok=True)
    paths = [one / "engine" for one in folders]
    if len(os.fsencode(paths[-1])) > _LONGEST:
        raise ConfigError(f"{paths[-1]}: too long a path for a socket; shorten TMPDIR")
    return paths


def _lock_folder(folder: Path) -> int:
    """Lock a folder; returns the file that holds the lock until all copies are closed."""
    part = folder / f"{_LOCK}.part"
    file = os.open(part, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)
    part.rename(folder / _LOCK)  # never there without a lock
    return file


def _remove_if_left(folder: Path) -> None:
    """Remove a folder of this user if no process holds its lock."""
    with contextlib.suppress(OSError):  # another user's, locked, or gone by now
        about = folder.lstat()
        if about.st_uid != os.getuid() or not stat.S_ISDIR(about.st_mode):
            return
        file = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(file)

"""The folder in which the processes of one server meet, for as long as they run.

Whoever is killed removes nothing. So a folder is locked by its server, and with it by all
that are forked from it: one that nobody holds any more was left behind, and the next
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

_PREFIX: Final = "minfer-"
_LOCK: Final = "lock"


@contextlib.contextmanager
def run_folder() -> Iterator[Path]:
    """A new folder, which is gone at the end; and so is what others left behind."""
    for one in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        _remove_if_left(one)
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as name:
        lock = _locked(Path(name))
        try:
            yield Path(name)
        finally:
            os.close(lock)


def _locked(folder: Path) -> int:
    """Lock a folder; returns what holds the lock, until all who have it close it."""
    part = folder / f"{_LOCK}.part"
    file = os.open(part, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)
    part.rename(folder / _LOCK)  # never there without being held
    return file


def _remove_if_left(folder: Path) -> None:
    """Remove a folder of ours whose lock nobody holds."""
    with contextlib.suppress(OSError):  # it is somebody else's, held, or gone by now
        about = folder.lstat()
        if about.st_uid != os.getuid() or not stat.S_ISDIR(about.st_mode):
            return
        file = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(file)

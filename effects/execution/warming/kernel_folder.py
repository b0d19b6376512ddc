"""The folder in which Triton keeps compiled kernels, so that the next start finds them.

Triton writes each kernel to its folder before it loads it, and fails if it cannot. So if
the folder cannot be written, or its disk is full, a spare folder on this machine takes
its place: complete kernels of the first folder are linked there, and others are compiled
to it. No other user has access to the spare folder, as kernels in it are code. It is the
same for all processes, and stays until the machine or container restarts.
"""

import contextlib
import json
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from minfer.values.checks import ConfigError

PROBE_BYTES: Final = 1 << 20  # written to see whether that works
MIN_FREE_BYTES: Final = 256 << 20  # for the kernels of a model
SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - the folder in it is checked
_log = logging.getLogger("minfer.executor")


def prepare_kernel_folder() -> None:
    """Have Triton use a spare folder, with a warning, if its own cannot be written.
    Raises ConfigError if neither can.
    """
    from triton import knobs

    if not knobs.cache.dir:  # TRITON_CACHE_DIR is empty: as if it were not set
        knobs.cache.dir = knobs.cache.get_triton_dir("cache")
    folder = Path(knobs.cache.dir)
    if not (problem := write_problem(folder)):
        return
    spare = _spare_folder(folder, problem)
    for link in spare.iterdir():
        if link.is_symlink() and not _is_complete(link):
            # What it led to is gone; another process may have removed it, too.
            link.unlink(missing_ok=True)
    linked = sum(_link(kernel, spare) for kernel in _complete_kernels(folder))
    knobs.cache.dir = str(spare)
    _log.warning(
        "compiled kernels cannot be kept in %s: %s. %d that are there are used; others "
        "are compiled to %s, and again after the machine or container has restarted, "
        "which takes 10 to 30 s of each start. Set TRITON_CACHE_DIR to a folder that can "
        "be written",
        folder,
        problem,
        linked,
        spare,
    )


def write_problem(folder: Path) -> str:
    """Returns why kernels cannot be written to a folder, which is made if it is missing;
    empty if they can.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix="tmp.minfer-") as probe:
            probe.write(bytes(PROBE_BYTES))
            probe.flush()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return error.strerror or repr(error)
    if free < MIN_FREE_BYTES:
        mebibytes = MIN_FREE_BYTES >> 20
        return f"{free >> 20} MiB are free there, and kernels may take {mebibytes}"
    return ""


def _spare_folder(folder: Path, problem: str) -> Path:
    """Returns a folder that can be written, in place of one with a problem. Raises
    ConfigError if there is none.
    """
    tried = [f"{folder}: {problem}"]
    for parent in dict.fromkeys((*_temporary_folder(), SHARED_MEMORY)):
        spare = Path(parent) / f"minfer-kernels-{os.getuid()}"
        if not (spare_problem := _spare_problem(spare)):
            return spare
        tried.append(f"{spare}: {spare_problem}")
    raise ConfigError(
        f"compiled kernels cannot be written anywhere ({'; '.join(tried)}): set "
        "TRITON_CACHE_DIR to a folder that can be written"
    )


def _spare_problem(spare: Path) -> str:
    """Returns why a spare folder, which is made if it is missing, cannot be used; empty
    if it can.
    """
    try:
        spare.mkdir(mode=stat.S_IRWXU, exist_ok=True)
        if not _is_private(spare):
            return "other users have access to it"
    except OSError as error:
        return error.strerror or repr(error)
    return write_problem(spare)


def _temporary_folder() -> Iterator[str]:
    """Yields the folder for temporary files, if one of those can be written."""
    with contextlib.suppress(FileNotFoundError):
        yield tempfile.gettempdir()


def _is_private(folder: Path) -> bool:
    """Returns whether a path is a folder of this user, and no other has access to it."""
    status = folder.lstat()
    is_folder = stat.S_ISDIR(status.st_mode)
    others = status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    return is_folder and status.st_uid == os.getuid() and not others


def _complete_kernels(folder: Path) -> Iterator[Path]:
    """Yields the folders of kernels, and of their launchers, that are complete."""
    try:
        yield from filter(_is_complete, folder.iterdir())
    except OSError:  # it cannot be read either
        return


def _is_complete(kernel: Path) -> bool:
    """Returns whether the folder of a kernel, or of its launcher, was written to the
    end.
    """
    groups = [*kernel.glob("__grp__*.json")]
    return all(map(_is_usable, groups)) and bool(groups or any(kernel.glob("*.so")))


def _is_usable(group: Path) -> bool:
    """Returns whether the files of a kernel are where Triton looks for them: at the paths
    at which they were written, so not if the folder was moved or is mounted elsewhere.
    Triton would compile it again, to the folder that cannot be written.
    """
    try:
        paths = json.loads(group.read_bytes())["child_paths"].values()
        return all(map(os.path.exists, paths))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def _link(kernel: Path, spare: Path) -> bool:
    """Link a kernel's folder into the spare one, unless it is there; returns whether it
    is there now.
    """
    link = spare / kernel.name
    try:
        link.symlink_to(kernel.resolve(), target_is_directory=True)
    except FileExistsError:  # of an earlier start, or of another process
        return True
    except OSError:
        return False
    return True

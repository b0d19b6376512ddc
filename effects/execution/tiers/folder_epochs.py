"""The epochs of the prefix cache, in the folder of its blocks.

Cached blocks are made unfindable by changing the keys of later requests: keys depend on
an epoch of all, and salts of tenants on one of theirs. Blocks on disk outlive an engine,
so epochs are beside them: all engines of the folder read them, when they start and
whenever they have changed, which takes a microsecond to see. Epochs are random numbers,
so none comes again if the file is lost: then all blocks are unfindable.
"""

import fcntl
import hashlib
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from attrs import define, evolve, field, frozen

from minfer.effects.execution.tiers.block_files import (
    DISK_FULL_ERRORS,
    FILE_FORMAT,
    open_regular,
)
from minfer.values.checks import ConfigError

FILE_NAME: Final = "minfer-kv.json"
LOCK_NAME: Final = "minfer-kv.lock"
EPOCH_BITS: Final = 62  # of an epoch
MAX_FILE_BYTES: Final = 1 << 24  # of FILE_NAME: those of 200,000 tenants
_log = logging.getLogger("minfer.executor")


def _new_epoch() -> int:
    return 1 + secrets.randbits(EPOCH_BITS)


def _is_epoch(value: Any) -> bool:
    return type(value) is int and 0 < value <= 1 << EPOCH_BITS


@frozen
class _Epochs:
    """The contents of the file."""

    all: int = field(factory=_new_epoch)
    tenants: dict[str, int] = field(factory=dict)  # by a digest of their names

    def text(self) -> str:
        return json.dumps(
            {"format": FILE_FORMAT, "epoch": self.all, "tenants": self.tenants}
        )


@define(eq=False)
class FolderEpochs:
    """The epochs of a folder. Methods may be called from any thread."""

    folder: Path
    _known: _Epochs = field(init=False, factory=_Epochs)
    _read_stamp: tuple[int, ...] = field(init=False, default=())  # the file that was read
    _lock: threading.Lock = field(init=False, factory=threading.Lock)

    @classmethod
    def open(cls, folder: Path) -> "FolderEpochs":
        """Returns the epochs of a folder, which is made if it is not there. Raises
        ConfigError if it cannot be written, or is not one of KV blocks of this format. A
        disk that is full now does not matter: an engine could not be started again.
        """
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            names = os.listdir(folder)
            strange = [name for name in names if not _is_ours(name)]
            if FILE_NAME not in names and strange:
                raise ConfigError(
                    f"kv_disk {folder} has other files ({min(strange)!r:.80}); name a "
                    "folder of its own, which is made if it is not there"
                )
            for name in names:
                if _is_subfolder(name) and not (folder / name).is_dir():
                    raise ConfigError(
                        f"kv_disk {folder} cannot be used: {folder / name} is not a "
                        "folder; remove it"
                    )
            _check_format(folder / FILE_NAME)
            epochs = cls(folder)
            try:  # writes, so it is known whether that can be
                epochs._change(lambda now: now)
            except OSError as error:
                if error.errno not in DISK_FULL_ERRORS or not epochs._look():
                    raise
        except OSError as error:
            raise ConfigError(f"kv_disk {folder} cannot be used: {error}") from error
        return epochs

    @property
    def of_all(self) -> int:
        """The epoch of all requests."""
        return self._now().all

    def of_tenant(self, name: str) -> int:
        """Returns a tenant's epoch; 0: never reset."""
        return self._now().tenants.get(_digest(name), 0)

    def raise_all(self) -> None:
        """Make all blocks unfindable for new requests. Raises OSError."""
        self._change(lambda now: evolve(now, all=_new_epoch()))

    def raise_tenant(self, name: str) -> None:
        """Make a tenant's blocks unfindable for its new requests. Raises OSError."""
        new_epoch = {_digest(name): _new_epoch()}
        self._change(lambda now: evolve(now, tenants=now.tenants | new_epoch))

    def _now(self) -> _Epochs:
        """Returns the epochs now. Where the file cannot be read, this engine's own stay
        in use, and the first engine that can write the file replaces it.
        """
        with self._lock:
            if self._look():
                return self._known
        try:
            self._change(lambda now: now)
        except OSError as error:
            _log.warning("%s cannot be written: %s", self.folder / FILE_NAME, error)
        return self._known

    def _change(self, make: Callable[[_Epochs], _Epochs]) -> None:
        """Change the file, as no other engine does meanwhile."""
        with self._lock, self._locked():
            # Without a file, nothing that was stored before is found.
            now = self._known if self._look() else _Epochs()
            temp_path = self.folder / f"{FILE_NAME}.{secrets.token_hex(6)}.part"
            try:
                temp_path.write_text(make(now).text())
                stamp = time.time_ns()  # finer than the file system's own clock
                os.utime(temp_path, ns=(stamp, stamp))
                temp_path.rename(self.folder / FILE_NAME)
            except OSError:
                temp_path.unlink(missing_ok=True)
                raise
            self._look()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock = open_regular(self.folder / LOCK_NAME, os.O_RDWR | os.O_CREAT)
        with open(lock, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _look(self) -> bool:
        """Read the file if it has changed; returns whether it can be used."""
        try:
            status = (self.folder / FILE_NAME).lstat()
            seen = status.st_ino, status.st_mtime_ns, status.st_size
            if seen != self._read_stamp:
                content = _read(self.folder / FILE_NAME)
                epoch, tenants = content["epoch"], dict(content["tenants"])
                if not all(map(_is_epoch, (epoch, *tenants.values()))):
                    return False
                self._known, self._read_stamp = _Epochs(epoch, tenants), seen
        except (OSError, ValueError, TypeError, KeyError):
            return False
        return True


def _is_ours(name: str) -> bool:
    """Returns whether a name in the folder is one that engines, or file systems, make."""
    known = name.startswith("minfer-kv.") or _is_subfolder(name)
    return known or name == "lost+found"  # where the folder is a whole file system


def _is_subfolder(name: str) -> bool:
    """Returns whether a name is that of a folder of blocks."""
    return len(name) == 2 and name.isalnum()


def _digest(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=16, person=b"tenant").hexdigest()


def _read(path: Path) -> Any:
    """Returns the contents of the file. Raises OSError, and ValueError for what no engine
    has written.
    """
    with open(open_regular(path), "rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"{path} has more than {MAX_FILE_BYTES} bytes")
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply") from error


def _check_format(file: Path) -> None:
    """Raise ConfigError for a folder of another format, and OSError."""
    try:
        format_read = _read(file)["format"]
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return  # there is none, or it will be replaced
    if format_read != FILE_FORMAT:
        raise ConfigError(
            f"kv_disk {file.parent} was written by another version of minfer (format "
            f"{format_read!r:.20}; this one has {FILE_FORMAT}); name another folder"
        )

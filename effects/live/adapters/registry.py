"""The names of a model's adapters, as all processes of a server know them.

    name --> AdapterEntry (digest, folder, origin) --> folder of the digest

An API server adds and removes names; an engine finds the folder of a digest, whenever its
core asks for that adapter: so an engine that restarts needs to be told nothing. All of
this is one small file in a folder of the server alone. It is replaced as a whole, under a
lock, so that a reader never sees half of a change, and that a name which one API server
has loaded is known to the next request at any other one.

A digest outlives its name: requests that run, or that are resumed after an engine's
death, may still need it. The folders of the last `MAX_RETIRED` digests are kept.
"""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec
from attrs import evolve, field, frozen

from minfer.effects.setup.lora_settings import AdapterNameError

MAX_ADAPTERS: Final = 4096  # names at once
MAX_RETIRED: Final = 1024  # digests without a name whose folders are kept
_FILE_NAME, _LOCK_NAME = "adapters.json", "lock"


@frozen(kw_only=True)
class AdapterEntry:
    """An adapter under a name."""

    name: str
    digest: str  # of its tensors and configuration, in hexadecimal digits
    folder: str  # absolute, without links
    origin: str  # where it comes from, as clients are told
    parent: str = ""  # its base model, as clients are told
    rank: int  # the largest of its matrices
    size: int  # bytes of its tensors
    created: int = 0  # Unix time at which it got its name


@frozen
class _Table:
    """All names, in the order in which they were added, and the folders of digests."""

    names: Mapping[str, AdapterEntry] = field(factory=dict)
    folders: Mapping[str, str] = field(factory=dict)  # oldest first
    modules_read: bool = False  # those that the server was started with


_decoder: Final = msgspec.json.Decoder(_Table)


class AdapterRegistry:
    """The names, in a folder that processes of one server share. Changes wait for a lock,
    so they are not for an event loop; reading takes microseconds.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / _FILE_NAME
        folder.mkdir(mode=0o700, exist_ok=True)
        # What was read last, and of which file.
        self._read: tuple[tuple[int, int, int], _Table] | None = None

    def entries(self) -> list[AdapterEntry]:
        """Returns all adapters that have a name, the oldest first."""
        return list(self._table().names.values())

    def find(self, name: str) -> AdapterEntry | None:
        """Returns the adapter of a name, if it is one."""
        return self._table().names.get(name)

    def folder_of(self, digest: str) -> str | None:
        """Returns where the files of a digest are, if it has, or lately had, a name."""
        return self._table().folders.get(digest)

    def name_of(self, digest: str) -> str:
        """Returns a name of a digest, or nothing."""
        entries = self._table().names.values()
        return next((entry.name for entry in entries if entry.digest == digest), "")

    @property
    def modules_read(self) -> bool:
        """Whether the adapters that the server was started with got their names."""
        return self._table().modules_read

    def note_modules_read(self) -> None:
        """Note that they did: an engine that restarts does not name them again, as some
        may have been unloaded since.
        """
        self._change(lambda table: evolve(table, modules_read=True))

    def add(self, entry: AdapterEntry, *, replace: bool = False) -> None:
        """Give an adapter its name. The same adapter may be added again. Raises
        AdapterNameError if another one has the name, unless this is to `replace` it.
        """

        def change(table: _Table) -> _Table:
            old = table.names.get(entry.name)
            if old is not None and old.digest != entry.digest and not replace:
                raise AdapterNameError(
                    f"there is an adapter {entry.name!r} already, with other weights "
                    f"(from {old.origin}); unload it first, or choose another name"
                )
            if old is None and len(table.names) >= MAX_ADAPTERS:
                raise AdapterNameError(
                    f"there are {MAX_ADAPTERS} adapters, and no more can be; unload one "
                    "first"
                )
            folders = {**table.folders}
            folders.pop(entry.digest, None)
            folders[entry.digest] = entry.folder
            names = {**table.names, entry.name: entry}
            return evolve(table, names=names, folders=_bounded(folders, names))

        self._change(change)

    def remove(self, name: str) -> AdapterEntry:
        """Take an adapter's name away, and return it. Raises AdapterNameError."""
        removed = list[AdapterEntry]()

        def change(table: _Table) -> _Table:
            names = {**table.names}
            if (entry := names.pop(name, None)) is None:
                raise AdapterNameError(f"there is no adapter {name!r:.210}")
            removed.append(entry)
            return evolve(table, names=names, folders=_bounded(table.folders, names))

        self._change(change)
        return removed[0]

    def _table(self) -> _Table:
        """Returns the table, which is read again if its file was replaced."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return _Table()
        identity = (status.st_ino, status.st_mtime_ns, status.st_size)
        read = self._read
        if read is None or read[0] != identity:
            # A file replaced since then is read once more at the next look.
            read = self._read = (identity, _decoder.decode(self._path.read_bytes()))
        return read[1]

    def _change(self, change: Callable[[_Table], _Table]) -> None:
        with self._locked():
            before = self._table()
            after = change(before)
            if after == before:
                return
            part = self._folder / f"{_FILE_NAME}.part"
            part.write_bytes(msgspec.json.encode(after))
            part.rename(self._path)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of all processes, and of this one's threads."""
        file = os.open(
            self._folder / _LOCK_NAME, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600
        )
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)


def _bounded(
    folders: Mapping[str, str], names: Mapping[str, AdapterEntry]
) -> dict[str, str]:
    """Returns the folders of all digests that have a name, and of the last ones that had
    one.
    """
    named = {entry.digest for entry in names.values()}
    retired = [digest for digest in folders if digest not in named]
    dropped = set(retired[: max(0, len(retired) - MAX_RETIRED)])
    return {digest: folder for digest, folder in folders.items() if digest not in dropped}

"""A folder of KV blocks, a file each, which engines of one machine share and which stays
when they end.

    minfer-kv.json      the format, and the epochs of the prefix cache (`folder_epochs`)
    a7/<key>.cpu        a block, by its content key: two digits of it are the subfolder

Files appear whole, by renaming, and never change. Any engine removes the least recently
used ones when the folder exceeds its size: a file's time is when it was last used, so the
engines need to know nothing of each other, and a missing file is normal. An engine
counts what it writes, and looks at the whole folder again once that is a part of the
size; so a folder that several engines share may exceed it by this part for each.

Keys cover the model, its weights and the format of its KV, so models can share a folder,
too; results of different kinds of devices differ in rounding, and have names of their
own.
"""

import errno
import logging
import os
import re
import secrets
import stat
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

from attrs import define, field

from minfer.blocks.keys import DIGEST, Key, Keys, group_key
from minfer.effects.execution.tiers.block_files import (
    CAUSES,
    DISK_FULL_ERRORS,
    FOREIGN,
    HEADER_BYTES,
    MISSING,
    Signature,
    UnusableFileError,
    open_regular,
    read_block,
    write_block,
)
from minfer.effects.execution.tiers.head_slices import WHOLE_BLOCK, HeadSlices
from minfer.effects.execution.tiers.keyed_store import Contents, NotStoredError

# Of its size, this part (1/20) is written between two scans of the folder, and freed at
# once.
SIZE_DIVISOR: Final = 20
DISK_UNIT_BYTES: Final = 4096  # of a file system's block
# After these no engine writes to a .part file any more.
ABANDONED_SECONDS: Final = 600.0
RETRY_SECONDS: Final = 60.0  # without stores, after one could not be written
MAX_KNOWN_KEYS: Final = 1 << 17  # keys that are remembered: of used, and of refused files
FRESH_SECONDS: Final = 60.0  # in which a file's use is not noted again
# Errors of a store where something else is in place of the file or of its subfolder:
# other blocks can be stored.
IN_PLACE_ERRORS: Final = (
    *(errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ELOOP),
    *(errno.EACCES, errno.EPERM),
)
_NAME: Final = re.compile(r"[0-9a-f]{64,66}\.[a-z]+")
_PART_NAME: Final = re.compile(_NAME.pattern + r"\.[0-9a-f]+\.part")
_log = logging.getLogger("minfer.executor")

# Counts: of blocks, bytes, seconds; and of files that could not be used, by cause.
STORED, STORED_BYTES = "kv_disk_stored_blocks", "kv_disk_stored_bytes"
FETCHED, FETCHED_BYTES = "kv_disk_fetched_blocks", "kv_disk_fetched_bytes"
STORING, FETCHING = "kv_disk_store_seconds", "kv_disk_fetch_seconds"
DROPPED = "kv_disk_dropped_blocks"
REFUSED: Final = "kv_disk_refused_files "  # and the cause
COUNTS: Final = (
    *(STORED, STORED_BYTES, STORING, DROPPED),
    *(FETCHED, FETCHED_BYTES, FETCHING),
    *(REFUSED + cause for cause in CAUSES),
)


class StoppedError(NotStoredError):
    """Nothing is stored for a while, as a write has failed."""


def file_bytes(contents: int) -> int:
    """Returns the bytes on disk of a block with `contents` bytes of contents."""
    return -(-(HEADER_BYTES + contents) // DISK_UNIT_BYTES) * DISK_UNIT_BYTES


@define(eq=False)
class BlockFolder:
    """One engine's view of the folder, which is there. Methods may be called from any
    thread.
    """

    path: Path
    size: int  # bytes, of all files of all engines
    device: str  # the kind of device that computed the KV: "cpu", "cuda"
    signature: Signature = field(factory=Signature)
    groups: int = 1  # of layers, with keys of their own
    probed: int = 0  # the group that is asked for, to find out what there is
    slices: HeadSlices = field(init=False, default=WHOLE_BLOCK)
    counts: dict[str, float] = field(
        init=False, factory=lambda: dict.fromkeys(COUNTS, 0.0)
    )
    full: bool = field(init=False, default=False)  # the disk was, at the last store
    _lock: threading.Lock = field(init=False, factory=threading.Lock)
    _room_lock: threading.Lock = field(init=False, factory=threading.Lock)
    _scanned_bytes: int | None = field(
        init=False, default=None
    )  # bytes, at the last scan
    _written_bytes: int = field(init=False, default=0)  # bytes since then
    _stopped_until: float = field(init=False, default=0.0)  # until when nothing is stored
    _warned: bool = field(init=False, default=False)
    _refused: set[Key] = field(init=False, factory=set)  # files of no use here
    _used: dict[Key, float] = field(init=False, factory=dict)  # at these monotonic times
    _notes: ThreadPoolExecutor = field(
        init=False, factory=lambda: ThreadPoolExecutor(1, "minfer-kv-notes")
    )

    def name(self, key: Key) -> Path:
        """Returns the file of the block with a key."""
        return self.path / key[-1:].hex() / f"{key.hex()}.{self.device}"

    def blocks(self, contents: int) -> int:
        """Returns how many blocks the folder holds, of `contents` bytes each."""
        return self.size // file_bytes(contents)

    # --- what there is ------------------------------------------------------------------

    def leading(self, keys: Keys) -> int:
        """Returns how many of a prompt's leading blocks are there; notes that these are
        used. A binary search, for few calls to the operating system: a block may be
        missing among those that it finds.
        """
        now, indices = time.monotonic(), range(len(keys))
        num_found = bisect_left(
            indices, True, key=lambda index: not self._is_there(keys[index], now)
        )
        stale = [key for key in keys[:num_found] if not self._is_fresh(key, now)]
        if stale:
            if len(self._used) > MAX_KNOWN_KEYS:
                self._used.clear()
            self._used.update(dict.fromkeys(stale, now))
            with suppress(RuntimeError):  # it was closed
                self._notes.submit(self._note_uses, stale)
        return num_found

    def _is_fresh(self, key: Key, now: float) -> bool:
        return now - self._used.get(key, -FRESH_SECONDS) < FRESH_SECONDS

    def _is_there(self, key: Key, now: float) -> bool:
        if self._is_fresh(key, now):
            return True
        with suppress(OSError):  # it is not there, or cannot be accessed
            return stat.S_ISREG(self.name(group_key(key, self.probed)).lstat().st_mode)
        return False

    def _note_uses(self, keys: Sequence[Key]) -> None:
        """Note that blocks are used, in all groups: parents later than their children, so
        that they stay longer.
        """
        stamp = time.time_ns()
        for place, key in enumerate(keys):
            for group in range(self.groups):
                try:
                    name = self.name(group_key(key, group))
                    times = (stamp - place, stamp - place)
                    os.utime(name, ns=times, follow_symlinks=False)
                except FileNotFoundError:
                    if group == self.probed:
                        self._used.pop(key, None)
                except OSError:
                    pass  # it may only be read

    def close(self) -> None:
        """Note what was used, and end."""
        self._notes.shutdown()

    # --- blocks -------------------------------------------------------------------------

    def read(self, key: Key, layout: bytes, contents: Contents) -> None:
        """Read a block into `contents`; its use was noted by `leading`. Raises
        UnusableFileError; a broken file of this deployment is removed.
        """
        try:
            size = read_block(self.name(key), key, layout, contents, self.signature)
        except UnusableFileError as error:
            self._refuse(key, error)
            raise
        with self._lock:
            self.counts[FETCHED] += 1
            self.counts[FETCHED_BYTES] += size

    def _refuse(self, key: Key, error: UnusableFileError) -> None:
        if error.removable:
            with suppress(OSError):
                self.name(key).unlink()
        with self._lock:
            self.counts[REFUSED + error.cause] += 1
            first = self.counts[REFUSED + error.cause] == 1
            self._used.pop(key[-DIGEST:], None)
            if error.cause != MISSING:
                if len(self._refused) >= MAX_KNOWN_KEYS:
                    self._refused.clear()
                self._refused.add(key)
        if first and error.cause != MISSING:
            _log.warning("KV blocks on disk are not used: %s; more are counted", error)

    def write(self, key: Key, layout: bytes, contents: Contents) -> None:
        """Write a block, unless it is there, or something else that cannot be replaced
        is in its place. Raises StoppedError if no block can be written, and for a while
        after that.
        """
        self.check_stores()
        name = self.name(key)
        length = sum(map(len, contents))
        try:
            if key not in self._refused and _touch(name, HEADER_BYTES + length):
                return
            self._make_room(file_bytes(length))
            name.parent.mkdir(mode=0o700, exist_ok=True)
            temp_path = name.with_name(f"{name.name}.{secrets.token_hex(6)}.part")
            size = write_block(name, temp_path, key, layout, contents, self.signature)
        except OSError as error:
            if error.errno in IN_PLACE_ERRORS:
                self._refuse(key, UnusableFileError(FOREIGN, name))
                return
            self._stop(error)
            raise StoppedError(str(error)) from error
        with self._lock:
            self._warned = self.full = False
            self._refused.discard(key)
            self.counts[STORED] += 1
            self.counts[STORED_BYTES] += size

    def check_stores(self) -> None:
        """Raise StoppedError if nothing is stored at present."""
        if time.monotonic() < self._stopped_until:
            raise StoppedError("KV blocks cannot be stored on disk at present")

    def _stop(self, error: OSError) -> None:
        with self._lock:
            self._stopped_until = time.monotonic() + RETRY_SECONDS
            self.full = error.errno in DISK_FULL_ERRORS
            warned, self._warned = self._warned, True
        if not warned:
            _log.warning(
                "KV blocks cannot be stored in %s: %s; requests are served, and it is "
                "tried again each %.0f s",
                self.path,
                error,
                RETRY_SECONDS,
            )

    def note(self, *, fetches: bool, seconds: float, dropped: int = 0) -> None:
        """Count the time of a transfer, and blocks that were not stored."""
        with self._lock:
            self.counts[FETCHING if fetches else STORING] += seconds
            self.counts[DROPPED] += dropped

    def open(self, layout: bytes, block_bytes: int) -> None:
        """As `KeyedStore` says: a folder needs no preparation."""

    def want(self, keys: Keys, engine: str) -> None:
        """As `KeyedStore` says: a folder sends nothing."""

    def totals(self) -> dict[str, float]:
        """Returns all counts so far."""
        with self._lock:
            return dict(self.counts)

    def forget_counts(self) -> None:
        """Count from zero again."""
        with self._lock:
            self.counts = dict.fromkeys(COUNTS, 0.0)

    def uncache(self, keys: Keys) -> None:
        """Have the operating system forget the contents of these blocks, if it can."""
        for key in keys:
            with suppress(OSError), open(open_regular(self.name(key)), "rb") as file:
                os.fsync(file.fileno())
                if hasattr(os, "posix_fadvise"):  # Linux
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def remove(self, keys: Keys) -> None:
        """Remove these blocks."""
        for key in keys:
            with suppress(OSError):
                self.name(key).unlink()

    # --- its size -----------------------------------------------------------------------

    def _make_room(self, num_bytes: int) -> None:
        """Count a file of `num_bytes`, which is about to be written; removes others if
        there is no room.
        """
        with self._room_lock:
            scan_bytes = self.size // SIZE_DIVISOR
            full = (
                self._scanned_bytes or 0
            ) + self._written_bytes + num_bytes > self.size
            if (
                self._scanned_bytes is None
                or full
                or self._written_bytes + num_bytes > scan_bytes
            ):
                self._scanned_bytes, self._written_bytes = self._trim_files(num_bytes), 0
            self._written_bytes += num_bytes

    def _trim_files(self, num_bytes: int) -> int:
        """Remove the least recently used files if there is no room for `num_bytes` more;
        returns the bytes of all files then.
        """
        files = sorted(self._files())
        total = sum(size for _, size, _ in files)
        if total + num_bytes <= self.size:
            return total
        target_bytes = self.size - self.size // SIZE_DIVISOR - num_bytes
        for _, size, name in files:
            if total <= target_bytes:
                break
            with suppress(OSError):
                os.unlink(name)
            total -= size
        return total

    def _files(self) -> Iterator[tuple[int, int, str]]:
        """Yields all blocks: when they were used (ns), their bytes on disk, their paths.
        Removes what was left by engines that died while they wrote.
        """
        for number in range(256):
            try:
                entries = list(os.scandir(self.path / f"{number:02x}"))
            except OSError:
                continue
            for entry in entries:
                try:
                    status = entry.stat(follow_symlinks=False)
                    if _PART_NAME.fullmatch(entry.name):
                        if time.time() - status.st_mtime > ABANDONED_SECONDS:
                            os.unlink(entry.path)
                    elif _NAME.fullmatch(entry.name) and stat.S_ISREG(status.st_mode):
                        size = -(-status.st_size // DISK_UNIT_BYTES) * DISK_UNIT_BYTES
                        yield status.st_mtime_ns, size, entry.path
                except OSError:
                    continue  # another engine has removed it


def _touch(name: Path, size: int) -> bool:
    """Note that a file is used; returns whether it is there and has this size."""
    try:
        status = name.lstat()
        os.utime(name, follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size == size


def capacity(path: Path) -> int:
    """Returns the bytes of the file system of a folder, which need not exist."""
    absolute = path.absolute()
    for folder in (absolute, *absolute.parents):
        with suppress(OSError):  # it is not there, or cannot be accessed
            status = os.statvfs(folder)
            return status.f_blocks * status.f_frsize
    return 0

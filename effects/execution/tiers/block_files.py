"""The file of one KV block: a header, then the contents of its pages, part by part.

    magic, format, layout, owner, key, length and checksum of the contents, MAC of these

A file is used only if all of that is right, as it may be torn (no write is synchronized:
power may fail), changed by a bad disk, put here by another program, or written by another
version. Checksums are CRC-32 (zlib: 2.6 GB/s on a core, without the interpreter's lock,
so a few readers are faster than a disk). If the deployment has a secret, they are SHA-256
(1.8 GB/s), and the MAC is keyed by the secret: then no other program can make or change a
block.
"""

import errno
import hashlib
import os
import stat
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from attrs import field, frozen

from minfer.blocks.keys import Key
from minfer.effects.execution.tiers.keyed_store import (
    Contents,
    NotStoredError,
    checksum_of,
)

FILE_FORMAT: Final = 1
MAGIC: Final = b"minferKV"
MAX_KEY_BYTES: Final = 33
LAYOUT_BYTES: Final = 16  # of a digest of how pages are stored
CHECKSUM_BYTES: Final = 32
OWNER_BYTES: Final = 16
MAC_BYTES: Final = 32
# Errors of a disk that may be written later.
DISK_FULL_ERRORS: Final = (errno.ENOSPC, errno.EDQUOT)
# Why a file is not used.
MISSING: Final = "missing"
TORN: Final = "torn"
CORRUPTED: Final = "corrupted"
FOREIGN: Final = "foreign"
NEWER: Final = "newer"
UNREADABLE: Final = "unreadable"
CAUSES: Final = (MISSING, TORN, CORRUPTED, FOREIGN, NEWER, UNREADABLE)

_VERSION_STRUCT: Final = struct.Struct("<8sI")  # of every format
# Layout, owner, length of the key, key, length of the contents, checksum.
_HEADER_STRUCT: Final = struct.Struct(
    f"<{LAYOUT_BYTES}s{OWNER_BYTES}sB{MAX_KEY_BYTES}sQ{CHECKSUM_BYTES}s"
)
_SIGNED_BYTES: Final = _VERSION_STRUCT.size + _HEADER_STRUCT.size
HEADER_BYTES: Final = _SIGNED_BYTES + MAC_BYTES
# A name might be a link, or a pipe without a writer.
_SAFE_FLAGS: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_WRITE_FLAGS: Final = os.O_WRONLY | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL


class NotRegularFileError(OSError):
    """A folder, a link, a pipe or the like is where a file should be."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} is not a regular file; remove it")


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Returns a descriptor of a file, which is never waited for. Raises OSError, and
    NotRegularFileError if it is no regular file.
    """
    with suppress(FileNotFoundError):  # it may be made here
        if not stat.S_ISREG(path.lstat().st_mode):  # some cannot be opened
            raise NotRegularFileError(path)
    file = os.open(path, flags | _SAFE_FLAGS, 0o600)
    if not stat.S_ISREG(os.fstat(file).st_mode):  # it was replaced meanwhile
        os.close(file)
        raise NotRegularFileError(path)
    return file


class UnusableFileError(NotStoredError):
    """A file cannot be used as a block; `cause` is one of `CAUSES`."""

    def __init__(self, cause: str, path: Path, *, removable: bool = False) -> None:
        """`removable`: it is of this deployment, and broken."""
        super().__init__(f"{path} is {cause}")
        self.cause, self.removable = cause, removable


@frozen
class Signature:
    """What files are signed with."""

    secret: str = field(default="", repr=False)
    _key: bytes = field(init=False, repr=False)
    owner: bytes = field(init=False)  # which secret it is, or zeros

    def __attrs_post_init__(self) -> None:
        data = self.secret.encode("utf-8", "surrogateescape")
        key = hashlib.sha256(b"minfer KV files" + data).digest() if data else b""
        object.__setattr__(self, "_key", key)
        owner = hashlib.blake2b(b"owner", key=key, digest_size=OWNER_BYTES).digest()
        object.__setattr__(self, "owner", owner if data else bytes(OWNER_BYTES))

    def mac(self, header: bytes) -> bytes:
        """Returns the MAC of a header; without a secret, a checksum."""
        return hashlib.blake2b(header, key=self._key, digest_size=MAC_BYTES).digest()

    def checksum(self, contents: Contents) -> bytes:
        """Returns the checksum of a block's contents."""
        if self._key:
            digest = hashlib.sha256()
            for chunk in contents:
                digest.update(chunk)
            return digest.digest()
        return checksum_of(contents).to_bytes(CHECKSUM_BYTES, "little")


def write_block(
    path: Path,
    temp_path: Path,
    key: Key,
    layout: bytes,
    contents: Contents,
    signature: Signature,
) -> int:
    """Write a block to `temp_path`, and rename it to `path`; returns its bytes. Raises
    OSError, and leaves no file then.
    """
    length = sum(map(len, contents))
    header = _VERSION_STRUCT.pack(MAGIC, FILE_FORMAT) + _HEADER_STRUCT.pack(
        layout, signature.owner, len(key), key, length, signature.checksum(contents)
    )
    buffers = [memoryview(header + signature.mac(header)), *contents]
    file = os.open(temp_path, _WRITE_FLAGS, 0o600)
    try:
        try:
            while buffers:
                buffers = _skip_bytes(buffers, os.writev(file, buffers))
        finally:
            os.close(file)
        os.rename(temp_path, path)
    except BaseException:
        os.unlink(temp_path)
        raise
    return HEADER_BYTES + length


def read_block(
    path: Path, key: Key, layout: bytes, contents: Contents, signature: Signature
) -> int:
    """Read a block into `contents`; returns its bytes. Raises UnusableFileError: then
    what is in `contents` is undefined.
    """
    try:
        file = open_regular(path)
    except FileNotFoundError:
        raise UnusableFileError(MISSING, path) from None
    except NotRegularFileError as error:
        raise UnusableFileError(FOREIGN, path) from error
    except OSError as error:
        raise UnusableFileError(UNREADABLE, path) from error
    try:
        return _read(file, path, key, layout, contents, signature)
    except OSError as error:
        raise UnusableFileError(UNREADABLE, path) from error
    finally:
        os.close(file)


def _read(
    file: int,
    path: Path,
    key: Key,
    layout: bytes,
    contents: Contents,
    signature: Signature,
) -> int:
    size = os.fstat(file).st_size
    header = bytearray(HEADER_BYTES)
    buffers, num_read = [memoryview(header), *contents], 0
    while buffers and (count := os.readv(file, buffers)):
        num_read, buffers = num_read + count, _skip_bytes(buffers, count)
    _check_header(bytes(header[:num_read]), path, key, layout, signature)
    length = sum(map(len, contents))
    *_, stored_length, checksum = _HEADER_STRUCT.unpack_from(header, _VERSION_STRUCT.size)
    if stored_length != length:
        raise UnusableFileError(FOREIGN, path)
    if size != HEADER_BYTES + length or buffers:
        torn = size < HEADER_BYTES + length or bool(buffers)
        raise UnusableFileError(TORN if torn else CORRUPTED, path, removable=True)
    if signature.checksum(contents) != checksum:
        raise UnusableFileError(CORRUPTED, path, removable=True)
    return HEADER_BYTES + length


def _check_header(
    header: bytes, path: Path, key: Key, layout: bytes, signature: Signature
) -> None:
    """Raise UnusableFileError for a header, perhaps a part of one, of another block."""
    if len(header) < _VERSION_STRUCT.size:
        raise UnusableFileError(TORN, path, removable=MAGIC.startswith(header[:8]))
    magic, version = _VERSION_STRUCT.unpack_from(header)
    if magic != MAGIC or version < FILE_FORMAT:
        raise UnusableFileError(FOREIGN, path)
    if version > FILE_FORMAT:
        raise UnusableFileError(NEWER, path)
    if len(header) < HEADER_BYTES:
        raise UnusableFileError(TORN, path, removable=True)
    stored_layout, owner, size, stored_key, *_ = _HEADER_STRUCT.unpack_from(
        header, _VERSION_STRUCT.size
    )
    if owner != signature.owner:
        raise UnusableFileError(FOREIGN, path)
    if signature.mac(header[:_SIGNED_BYTES]) != header[_SIGNED_BYTES:]:
        raise UnusableFileError(CORRUPTED, path, removable=True)
    if stored_key[:size] != key:  # a file of this deployment under another's name
        raise UnusableFileError(FOREIGN, path, removable=True)
    if stored_layout != layout:
        raise UnusableFileError(FOREIGN, path)


def _skip_bytes(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    """Returns what is left of `buffers` after their first `count` bytes."""
    left = list(buffers)
    while left and count >= len(left[0]):
        count -= len(left.pop(0))
    if count:
        left[0] = left[0][count:]
    return left

"""KV blocks in a folder: files that were broken, a bounded size, several engines."""

import errno
import hashlib
import os
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from minfer.effects.execution.tiers import block_folder
from minfer.effects.execution.tiers.block_files import (
    CAUSES,
    FILE_FORMAT,
    HEADER_BYTES,
    Signature,
    UnusableFileError,
)
from minfer.effects.execution.tiers.block_folder import (
    COUNTS,
    FETCHED,
    REFUSED,
    STORED,
    BlockFolder,
    StoppedError,
    file_bytes,
)
from tests.effects.execution.strange_files import STRANGE

LAYOUT = b"sixteen bytes...", b"sixteen others.."
LENGTH = 5000
PAGES = file_bytes(LENGTH)


def key(number: int) -> bytes:
    return hashlib.sha256(bytes((number,))).digest()


def content(name: bytes, length: int = LENGTH) -> bytearray:
    return bytearray((name * (length // len(name) + 1))[:length])


def write(folder: BlockFolder, name: bytes, layout: bytes = LAYOUT[0]) -> None:
    contents = memoryview(content(name))
    folder.write(name, layout, [contents[:999], contents[999:]])


def read(folder: BlockFolder, name: bytes, layout: bytes = LAYOUT[0]) -> bytearray:
    """Into two parts, as of a cache with scales."""
    buffer = memoryview(bytearray(LENGTH))
    folder.read(name, layout, [buffer[:300], buffer[300:]])
    return bytearray(buffer)


def cause(folder: BlockFolder, name: bytes) -> str:
    """Why a block cannot be read, which is counted."""
    before = folder.totals()
    with pytest.raises(UnusableFileError) as caught:
        read(folder, name)
    counted = REFUSED + caught.value.cause
    assert folder.totals()[counted] == before[counted] + 1
    assert folder.totals()[FETCHED] == before[FETCHED]
    return caught.value.cause


@pytest.fixture
def folder(tmp_path: Path) -> BlockFolder:
    return BlockFolder(tmp_path, 100 * PAGES, "cpu")


def test_what_was_written_is_read_after_a_restart(folder: BlockFolder) -> None:
    names = [key(1), b"\x03" + key(1)]  # of two groups of layers
    for name in names:
        write(folder, name)
        write(folder, name)
    assert folder.totals()[STORED] == 2
    reopened = BlockFolder(folder.path, folder.size, "cpu")
    for name in names:
        assert read(reopened, name) == content(name)
        assert reopened.name(name).stat().st_mode & 0o777 == 0o600
    assert cause(reopened, key(2)) == "missing"
    assert cause(BlockFolder(folder.path, folder.size, "cuda"), key(1)) == "missing"


def truncated(length: int) -> Callable[[Path], object]:
    return lambda file: os.truncate(file, length)


def flipped(place: int) -> Callable[[Path], object]:
    def flip(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[place] ^= 0x10
        file.write_bytes(data)

    return flip


def replaced(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def replace(file: Path) -> None:
        file.unlink()
        make(file)

    return replace


def newer(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:8] + (FILE_FORMAT + 1).to_bytes(4, "little") + data[12:])


@pytest.mark.parametrize(
    ("breaks", "reason", "stays"),
    [
        (truncated(0), "torn", False),
        (truncated(10), "torn", False),
        (truncated(HEADER_BYTES - 1), "torn", False),
        (truncated(HEADER_BYTES), "torn", False),
        (truncated(HEADER_BYTES + LENGTH - 1), "torn", False),
        (truncated(HEADER_BYTES + LENGTH + 1), "corrupted", False),
        (flipped(HEADER_BYTES), "corrupted", False),
        (flipped(-1), "corrupted", False),
        (flipped(HEADER_BYTES - 1), "corrupted", False),
        (flipped(0), "foreign", True),
        (newer, "newer", True),
        (lambda file: file.write_text("notes of somebody"), "foreign", True),
        (replaced(os.mkdir), "foreign", True),
        (replaced(os.mkfifo), "foreign", True),
        (replaced(lambda file: file.symlink_to("/etc/hostname")), "foreign", True),
    ],
)
def test_a_broken_file_is_not_used(
    folder: BlockFolder, breaks: Callable[[Path], object], reason: str, stays: bool
) -> None:
    """Ours are removed; others are replaced when the block is stored again."""
    write(folder, key(1))
    file = folder.name(key(1))
    breaks(file)
    assert cause(folder, key(1)) == reason
    assert os.path.lexists(file) is stays
    if not file.is_dir():
        write(folder, key(1))
        assert read(folder, key(1)) == content(key(1))


@pytest.mark.parametrize("kind", STRANGE)
def test_what_stands_in_place_of_a_block_file_costs_that_block_alone(
    folder: BlockFolder, kind: str
) -> None:
    file = folder.name(key(1))
    file.parent.mkdir()
    STRANGE[kind](file)
    assert folder.leading((key(1),)) == 0
    assert cause(folder, key(1)) in ("foreign", "unreadable")
    folder.uncache((key(1),))
    for number in (1, 2):
        write(folder, key(number))
    assert read(folder, key(2)) == content(key(2))
    if "folder" in kind:  # it cannot be replaced
        assert cause(folder, key(1)) == "foreign"
        assert folder.totals()[STORED] == 1
    else:
        assert read(folder, key(1)) == content(key(1))


@pytest.mark.parametrize("kind", sorted({*STRANGE, "file"} - {"folder", "full folder"}))
def test_what_stands_in_place_of_a_subfolder_costs_its_blocks_alone(
    folder: BlockFolder, kind: str
) -> None:
    subfolder = folder.name(key(1)).parent
    {**STRANGE, "file": Path.touch}[kind](subfolder)
    assert folder.leading((key(1),)) == 0
    assert cause(folder, key(1)) in ("missing", "foreign", "unreadable")
    for number in (1, 2):
        write(folder, key(number))
    assert cause(folder, key(1)) in ("missing", "foreign", "unreadable")
    assert read(folder, key(2)) == content(key(2))
    assert folder.totals()[STORED] == 1


def test_what_is_no_block_is_neither_counted_nor_removed(tmp_path: Path) -> None:
    folder = BlockFolder(tmp_path, 20 * PAGES, "cpu")
    strange = [folder.name(key(number)) for number in range(100, 110)]
    for file in strange:
        file.parent.mkdir(exist_ok=True)
        file.symlink_to("x" * 4000)
        os.utime(file, (1, 1), follow_symlinks=False)
    for number in range(20):
        write(folder, key(number))
    assert all(map(os.path.lexists, strange))
    assert sum(folder.name(key(number)).exists() for number in range(20)) >= 18


def test_a_block_that_cannot_be_accessed_costs_that_block_alone(
    folder: BlockFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where another user's engine has made the subfolder."""

    def deny(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with monkeypatch.context() as patch:
        for name in ("open", "stat", "lstat", "utime"):
            patch.setattr(os, name, deny)
        assert folder.leading((key(1),)) == 0
        assert cause(folder, key(1)) == "unreadable"
        write(folder, key(1))
    write(folder, key(1))
    assert read(folder, key(1)) == content(key(1))


def test_no_byte_can_be_changed(folder: BlockFolder) -> None:
    write(folder, key(1))
    file = folder.name(key(1))
    contents = file.read_bytes()
    for place in (*range(HEADER_BYTES), *range(HEADER_BYTES, len(contents), 97)):
        file.write_bytes(contents)
        flipped(place)(file)
        assert cause(folder, key(1)) in ("corrupted", "foreign", "newer")


def test_files_of_others_are_refused(folder: BlockFolder) -> None:
    """Another block's, another layout's, another deployment's, or a forger's."""
    write(folder, key(1))
    os.link(folder.name(key(1)), folder.name(key(2)).parent.parent / "kept")
    folder.name(key(2)).parent.mkdir(exist_ok=True)
    os.link(folder.name(key(1)), folder.name(key(2)))
    assert cause(folder, key(2)) == "foreign"
    assert not folder.name(key(2)).exists()
    with pytest.raises(UnusableFileError, match="foreign"):
        read(folder, key(1), LAYOUT[1])
    signed, other_folder = (
        BlockFolder(folder.path, folder.size, "cpu", Signature(signature))
        for signature in "ab"
    )
    assert cause(signed, key(1)) == "foreign"
    write(signed, key(1))
    assert read(signed, key(1)) == content(key(1))
    assert cause(other_folder, key(1)) == cause(folder, key(1)) == "foreign"


def test_checksums_are_those_of_the_standards() -> None:
    """Whoever can change a file can keep its CRC-32: with a secret there is another."""
    pieces = [memoryview(b"some"), memoryview(b"contents")]
    crc = zlib.crc32(b"somecontents").to_bytes(32, "little")
    assert Signature().checksum(pieces) == crc
    assert Signature("a").checksum(pieces) == hashlib.sha256(b"somecontents").digest()


def test_the_least_recently_used_make_room(tmp_path: Path) -> None:
    folder = BlockFolder(tmp_path, 40 * PAGES, "cpu")
    for number in range(40):
        write(folder, key(number))
        os.utime(folder.name(key(number)), ns=(number, number))
    assert folder.leading((key(0), key(1), key(2), key(99))) == 3
    folder.close()  # their uses are noted
    times = [folder.name(key(number)).stat().st_mtime_ns for number in range(4)]
    assert times[0] > times[1] > times[2] > times[3] == 3
    assert folder.leading((key(3), key(99))) == 1
    write(folder, key(40))
    left = {number for number in range(41) if folder.name(key(number)).exists()}
    assert left == {0, 1, 2, *range(6, 41)}
    os.utime(folder.name(key(7)))
    strange = folder.name(key(1)).parent / "notes.txt"
    strange.write_text("not ours")
    smaller = BlockFolder(tmp_path, 20 * PAGES, "cpu")
    write(smaller, key(50))
    left = {number for number in range(51) if folder.name(key(number)).exists()}
    assert {0, 1, 2, 7, 40, 50} < left
    assert len(left) == 19 + 1 - 1
    assert strange.exists()


def test_parts_of_engines_that_died_are_removed(folder: BlockFolder) -> None:
    write(folder, key(1))
    file = folder.name(key(1))
    old, new = (file.with_name(f"{file.name}.{n}.part") for n in ("0a", "0b"))
    for path in (old, new):
        path.write_text("half")
    os.utime(old, (1, 1))
    write(BlockFolder(folder.path, folder.size, "cpu"), key(2))
    assert not old.exists()
    assert new.exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_full_disk_stops_stores_for_a_while(
    folder: BlockFolder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    code: int,
) -> None:
    write(folder, key(1))

    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", refuse)
        for number in (2, 3):
            with pytest.raises(StoppedError):
                write(folder, key(number))
            monkeypatch.setattr(block_folder, "RETRY_SECONDS", 0.0)
        assert read(folder, key(1)) == content(key(1))
    assert not list(folder.path.glob("*/*.part"))
    assert len(caplog.records) == 1
    with pytest.raises(StoppedError, match="at present"):
        write(folder, key(2))
    folder._stopped_until = 0.0
    write(folder, key(2))
    assert read(folder, key(2)) == content(key(2))


OTHER = """
import sys, time
from tests.effects.execution.test_block_folder import *
folder = BlockFolder(Path(sys.argv[1]), int(sys.argv[2]), "cpu")
stress(folder, int(sys.argv[3]))
"""


def stress(folder: BlockFolder, seed: int) -> int:
    """Write and read some blocks in turns; returns how many were there."""
    num_read = 0
    for turn in range(300):
        name = key((turn * 7 + seed * 31) % 60)
        try:
            assert read(folder, name) == content(name)
            num_read += 1
        except UnusableFileError:
            write(folder, name)
    counted = {name for name, count in folder.totals().items() if count}
    assert counted - {REFUSED + "missing"} <= set(COUNTS[: -len(CAUSES)])
    return num_read


def test_engines_share_a_folder(tmp_path: Path) -> None:
    size = 40 * PAGES
    command = [sys.executable, "-c", OTHER, str(tmp_path), str(size), "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    folder = BlockFolder(tmp_path, size, "cpu")
    counts = list[int]()
    threads = [
        threading.Thread(target=lambda n=n: counts.append(stress(folder, n)))
        for n in (2, 3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 0, errors
    assert len(counts) == 2
    assert stress(folder, 4) > 0
    assert not list(tmp_path.glob("*/*.part"))
    num_files = sum(1 for _ in tmp_path.glob("*/*.cpu"))
    assert num_files <= 40 + 2 * (1 + 40 // block_folder.SIZE_DIVISOR)

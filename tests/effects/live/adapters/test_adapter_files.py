"""Copies of files that others may change, replace or link elsewhere."""

import os
import threading
from pathlib import Path

import pytest

from minfer.effects.live.adapters import adapter_files
from minfer.effects.live.adapters.adapter_files import (
    MAX_CONFIG_BYTES,
    MAX_HEADER_BYTES,
    AdapterPathError,
    private_copy,
)
from minfer.effects.models.adapters.peft_config import CONFIG_NAME, AdapterError
from minfer.effects.models.adapters.peft_files import WEIGHTS_NAME

LENGTH = bytes(8)  # of an empty header
WEIGHTS, INSIDE, OUTSIDE = (LENGTH + word for word in (b"weights", b"inside", b"outside"))


def make_files(folder: Path, weights: bytes = WEIGHTS) -> Path:
    folder.mkdir(parents=True)
    (folder / CONFIG_NAME).write_text("{}")
    (folder / WEIGHTS_NAME).write_bytes(weights)
    return folder


def refusal(folder: Path, *allowed: Path, limit: int = 100) -> str:
    with (
        pytest.raises(AdapterError) as error,
        private_copy(folder, limit, allowed or None),
    ):
        pass
    return str(error.value)


def test_a_copy_is_nobody_elses_and_goes(tmp_path: Path) -> None:
    folder = make_files(tmp_path / "adapter")
    with private_copy(folder, 15, (tmp_path.resolve(),)) as copy:
        (folder / WEIGHTS_NAME).write_bytes(b"")  # someone empties it meanwhile
        assert (copy / WEIGHTS_NAME).read_bytes() == WEIGHTS
        assert sorted(path.name for path in copy.iterdir()) == [CONFIG_NAME, WEIGHTS_NAME]
        assert copy.stat().st_mode & 0o077 == 0
    assert not copy.exists()


def test_what_is_missing_or_too_large_is_named(tmp_path: Path) -> None:
    assert "there is no such folder" in refusal(tmp_path / "none")
    folder = make_files(tmp_path / "adapter")
    assert "it is no folder" in refusal(folder / CONFIG_NAME)
    assert "has 15 bytes, which is more than" in refusal(folder, limit=14)
    (folder / CONFIG_NAME).write_bytes(b" " * (MAX_CONFIG_BYTES + 1))
    assert f"at most {MAX_CONFIG_BYTES} are read" in refusal(folder)
    (folder / CONFIG_NAME).unlink()
    assert f"there is no {CONFIG_NAME}" in refusal(folder)


def test_a_huge_header_is_not_read(tmp_path: Path) -> None:
    for length in (MAX_HEADER_BYTES + 1, 2**63):
        weights = length.to_bytes(8, "little") + b"{}"
        folder = make_files(tmp_path / str(length), weights)
        words = f"says that its header has {length} bytes; at most {MAX_HEADER_BYTES} are"
        assert words in refusal(folder)


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    folder = make_files(tmp_path / "adapter")
    (folder / WEIGHTS_NAME).rename(folder / "adapter_model.bin")
    assert "adapter_model.bin is a pickle, which could run code" in refusal(folder)


@pytest.mark.parametrize("name", [CONFIG_NAME, WEIGHTS_NAME])
def test_a_pipe_or_a_folder_is_no_file(tmp_path: Path, name: str) -> None:
    folder = make_files(tmp_path / "adapter")
    (folder / name).unlink()
    os.mkfifo(folder / name)  # nobody ever writes to it
    assert f"{name} is no file" in refusal(folder)
    (folder / name).unlink()
    (folder / name).mkdir()
    assert f"{name} is no file" in refusal(folder)


def test_links_lead_nowhere_else(tmp_path: Path) -> None:
    allowed, outside = (tmp_path / "allowed").resolve(), make_files(tmp_path / "outside")
    inside = make_files(allowed / "inside")
    (allowed / "link").symlink_to(outside)
    assert "not below a folder that adapters may be" in refusal(allowed / "link", allowed)
    (allowed / "near").symlink_to(inside)  # to another folder that is allowed
    with private_copy(allowed / "near", 100, (allowed,)) as copy:
        assert (copy / WEIGHTS_NAME).read_bytes() == WEIGHTS
    (inside / WEIGHTS_NAME).unlink()
    (inside / WEIGHTS_NAME).symlink_to(outside / WEIGHTS_NAME)
    with pytest.raises(AdapterPathError), private_copy(inside, 100, (allowed,)):
        pass
    assert "not below" in refusal(allowed / ".." / "outside", allowed)


def test_what_is_checked_is_what_is_read(tmp_path: Path) -> None:
    """A folder that becomes a link, again and again: no copy has what is outside."""
    allowed, outside = (tmp_path / "allowed").resolve(), tmp_path / "outside"
    inside = make_files(allowed / "a", INSIDE)
    make_files(outside, OUTSIDE)
    link = allowed / "link"
    stop = threading.Event()

    def swap() -> None:
        targets = [inside, outside]
        while not stop.is_set():
            part = allowed / "part"
            part.symlink_to(targets[0])
            part.rename(link)
            targets.reverse()

    link.symlink_to(inside)
    swapper = threading.Thread(target=swap)
    swapper.start()
    seen = set()
    try:
        for _ in range(100):
            try:
                with private_copy(link, 100, (allowed,)) as copy:
                    seen.add((copy / WEIGHTS_NAME).read_bytes())
            except AdapterPathError:
                seen.add(b"refused")
    finally:
        stop.set()
        swapper.join()
    assert seen <= {INSIDE, b"refused"}
    link.unlink()
    link.symlink_to(inside)
    with private_copy(link, 100, (allowed,)) as copy:
        assert (copy / WEIGHTS_NAME).read_bytes() == INSIDE


def test_a_file_that_grows_is_not_copied_forever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_files(tmp_path / "adapter")
    monkeypatch.setattr(adapter_files, "_CHUNK_BYTES", 4)
    read = os.read

    def growing(opened: int, count: int) -> bytes:
        with (folder / WEIGHTS_NAME).open("ab") as file:
            file.write(b"more")
        return read(opened, count)

    monkeypatch.setattr(os, "read", growing)
    assert "more than an adapter may have here (--max-lora-size)" in refusal(folder)

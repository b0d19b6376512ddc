"""Journals in files: which are read, what is wrong with others, and whole ones."""

import os
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from minfer.effects.live.journal.journal_files import read_journal, write_journal
from minfer.journal.format import MAGIC, JournalError
from minfer.journal.reading import read_head
from minfer.journal.writing import head_record
from minfer.values.checks import ConfigError
from tests.core.recorded import recorded
from tests.effects.live.test_journal_writer import full, live


def test_what_is_no_journal_is_named(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")  # to open it would be to wait for a writer
    whys = {
        tmp_path / "none": "no such file",
        pipe: "no such file",
        tmp_path: "no .journal file",
    }
    for path, message in whys.items():
        with pytest.raises(JournalError, match=message):
            read_journal(path)
    (tmp_path / "x.journal").write_bytes(b"")
    with pytest.raises(JournalError, match="this file is empty"):
        read_journal(tmp_path)


def test_a_run_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    config, turns = recorded(1, 20)
    path = tmp_path / "run.journal"
    write_journal(path, config, turns)
    assert list(read_journal(path).turns()) == turns

    def broken() -> Any:
        yield turns[0]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_journal(tmp_path / "other.journal", config, broken())
    assert [p.name for p in tmp_path.iterdir()] == ["run.journal"]


def test_a_run_that_cannot_be_written_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, turns = recorded(1, 20)
    (tmp_path / "folder").mkdir()
    for name, message in (
        ("none/run.journal", "No such file or directory"),
        ("folder", "directory"),
    ):
        with pytest.raises(
            ConfigError, match=f"{tmp_path / name}: .*{message}; name another file"
        ):
            write_journal(tmp_path / name, config, turns)
    (tmp_path / "run.journal.part").write_bytes(b"left over")
    write_journal(tmp_path / "run.journal", config, turns)
    assert list(read_journal(tmp_path / "run.journal").turns()) == turns
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(
        ConfigError, match=r"run\.journal: No space left on device; name another"
    ):
        write_journal(tmp_path / "run.journal", config, turns[:9])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "run.journal"]
    assert list(read_journal(tmp_path / "run.journal").turns()) == turns


def test_of_a_folder_the_run_that_was_recorded_is_read(tmp_path: Path) -> None:
    config, turns = recorded(1, 20)
    for name in ("a-simulation", "fcfs-8-64-1.0", "fcfs-8-64-2.0", "fork", "zoo"):
        write_journal(tmp_path / f"{name}.journal", config, turns, {"name": name})
        assert read_journal(tmp_path).about["name"] == name
    driver, log = live(tmp_path, 20)
    driver.close()
    assert list(read_journal(tmp_path).turns()) == log


def test_a_torn_record_is_reported(tmp_path: Path) -> None:
    _, log = live(tmp_path, 60)
    (path,) = tmp_path.iterdir()
    os.truncate(path, path.stat().st_size - 3)
    journal = read_journal(path)
    assert list(journal.turns()) == log[:-1]
    assert "the last record is cut off" in journal.torn[0]


@pytest.mark.long
def test_segments_must_be_whole_and_of_one_run(tmp_path: Path) -> None:
    folders = []
    for name, count in (("one", 200), ("other", 150)):
        live(tmp_path / name, count, size=1)
        folders.append(sorted((tmp_path / name).iterdir()))
    (*_, before, last), (*_, strange) = folders
    data = last.read_bytes()
    list(read_journal(last.parent).turns())
    for cut in (b"", data[:40]):  # where power failed
        last.write_bytes(cut)
        journal = read_journal(last.parent)
        list(journal.turns())
        assert journal.torn == [f"{last}: it is cut off before its first turn"]
    damaged = data[:40] + bytes([data[40] ^ 1]) + data[41:]
    for broken in (damaged, data.replace(b"journal 1", b"journal 2", 1), b"junk"):
        last.write_bytes(broken)
        with pytest.raises(JournalError, match=last.name):
            list(read_journal(last.parent).turns())
    last.write_bytes(strange.read_bytes())
    with pytest.raises(
        JournalError, match=r"begins with|does not come after|of another run|state"
    ):
        list(read_journal(last.parent).turns())
    head = read_head(data, last.name)
    records = data[len(MAGIC) + len(head_record(head)) :]
    for change in ({"config": evolve(head.config, depth=5)}, {"digest": b"other..."}):
        last.write_bytes(MAGIC + head_record(evolve(head, **change)) + records)
        with pytest.raises(JournalError, match=f"{last.name}: it is of another run"):
            list(read_journal(last.parent).turns())
    assert before.is_file()

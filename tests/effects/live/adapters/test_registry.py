"""Names that several processes give and take, in one file."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from attrs import evolve

from minfer.effects.live.adapters import registry as registries
from minfer.effects.live.adapters.registry import AdapterEntry, AdapterRegistry
from minfer.effects.setup.lora_settings import AdapterNameError


def entry(name: str = "sql", digest: str = "ab", origin: str = "here") -> AdapterEntry:
    folder = f"/folder/{digest}"
    return AdapterEntry(
        name=name, digest=digest, folder=folder, origin=origin, rank=4, size=1
    )


def test_names_are_known_to_all(tmp_path: Path) -> None:
    here, there = AdapterRegistry(tmp_path), AdapterRegistry(tmp_path)
    assert there.find("sql") is None
    assert there.entries() == []
    here.add(entry())
    here.add(entry("chat", "cd"))
    assert [found.name for found in there.entries()] == ["sql", "chat"]
    assert there.find("sql") == entry()
    assert there.folder_of("cd") == "/folder/cd"
    assert (there.name_of("cd"), there.name_of("ee")) == ("chat", "")
    assert there.remove("sql") == entry()
    assert here.find("sql") is None
    assert here.folder_of("ab") == "/folder/ab"  # of requests that run


def test_a_name_is_given_once(tmp_path: Path) -> None:
    names = AdapterRegistry(tmp_path)
    names.add(entry())
    names.add(evolve(entry(), created=7))  # the same weights
    with pytest.raises(AdapterNameError, match="already, with other weights \\(from he"):
        names.add(entry(digest="cd"))
    assert names.find("sql") == evolve(entry(), created=7)
    names.add(entry(digest="cd"), replace=True)
    assert names.find("sql") == entry(digest="cd")
    names.remove("sql")
    with pytest.raises(AdapterNameError, match="there is no adapter 'sql'"):
        names.remove("sql")


def test_one_of_many_at_once_gets_a_name(tmp_path: Path) -> None:
    def add(number: int) -> bool:
        try:
            AdapterRegistry(tmp_path).add(entry(digest=f"{number:02}"))
        except AdapterNameError:
            return False
        AdapterRegistry(tmp_path).add(entry(f"own-{number}", f"{number:02}"))
        return True

    with ThreadPoolExecutor(8) as pool:
        given = list(pool.map(add, range(16)))
    assert given.count(True) == 1
    assert len(AdapterRegistry(tmp_path).entries()) == 2


def test_names_and_old_folders_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registries, "MAX_ADAPTERS", 2)
    monkeypatch.setattr(registries, "MAX_RETIRED", 2)
    names = AdapterRegistry(tmp_path)
    names.add(entry("kept", "00"))
    for number in range(1, 5):
        names.add(entry(digest=f"{number:02}"))
        with pytest.raises(AdapterNameError, match="no more can be; unload one"):
            names.add(entry("third", "99"))
        names.remove("sql")
    known = [digest for digest in ("00", "01", "02", "03") if names.folder_of(digest)]
    assert known == ["00", "03"]


def test_what_a_server_starts_with_is_named_once(tmp_path: Path) -> None:
    names = AdapterRegistry(tmp_path)
    assert not names.modules_read
    names.note_modules_read()
    assert AdapterRegistry(tmp_path).modules_read

"""Where adapters may come from, and where not."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from minfer.effects.live.adapters import sources
from minfer.effects.live.adapters.adapter_files import AdapterPathError
from minfer.effects.live.adapters.sources import (
    AdapterSource,
    AdapterSources,
    fetch,
    trusted_source,
)
from minfer.effects.models.adapters.peft_config import CONFIG_NAME, AdapterError
from minfer.effects.models.adapters.peft_files import WEIGHTS_NAME

HUB = {"sql": "org/sql@v1"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that is allowed, with an adapter, beside one that is not."""
    for name in ("allowed/team/one", "outside"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / CONFIG_NAME).write_text("{}")
    (tmp_path / "allowed" / "circle").symlink_to("circle")
    return tmp_path.resolve()


def test_a_name_is_a_folder_below_those_allowed_or_of_the_list(folder: Path) -> None:
    allowed = folder / "allowed"
    found = AdapterSources(folders=(folder / "none", allowed), hub=HUB)
    expected = AdapterSource(
        str(allowed / "team/one"), "team/one", (folder / "none", allowed)
    )
    assert found.of_name("team/one") == expected
    assert found.of_name("sql") == AdapterSource("org/sql@v1", "org/sql@v1", is_hub=True)
    names = ("team", "one", "org/sql@v1", "org/sql", "../outside", "/etc", "", "circle")
    for name in (*names, "team//one", "team/one/", "./team/one", "x" * 300, "a\0"):
        assert found.of_name(name) is None, name
    assert found.on_first_use
    assert not AdapterSources(runtime_updates=True).on_first_use


def test_a_path_leads_below_those_allowed_or_to_the_list(folder: Path) -> None:
    allowed = folder / "allowed"
    found = AdapterSources(folders=(allowed,), hub=HUB)
    expected = AdapterSource(str(allowed / "team/one"), "team/one", (allowed,))
    for path in ("team/one", "team/../team/one", str(allowed / "team/one")):
        assert found.of_path(path) == expected
    assert found.of_path("org/sql@v1").is_hub
    wrong = ("", ".", "..", "../outside", str(folder / "outside"), "/", "circle", "a\0")
    for path in wrong:
        with pytest.raises(AdapterPathError, match="this is neither"):
            found.of_path(path)


def test_what_a_program_names_may_be_anywhere(folder: Path) -> None:
    outside = str(folder / "outside")
    assert trusted_source(outside) == AdapterSource(outside, outside)
    assert trusted_source("org/name") == AdapterSource(
        "org/name", "org/name", is_hub=True
    )
    assert not trusted_source("name").is_hub  # a folder that is not there
    for text in ("a\0b", "x" * 5000, "a/" + "x" * 5000):
        assert trusted_source(text).path == text


def test_what_is_too_large_is_not_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, size = list[Any](), 100

    class Api:
        def model_info(self, name: str, **options: Any) -> Any:
            asked.append((name, options["revision"]))
            files = [(WEIGHTS_NAME, size), ("other.bin", 10**12)]
            found = [SimpleNamespace(rfilename=name, size=size) for name, size in files]
            return SimpleNamespace(siblings=found)

    def snapshot(name: str, cache: Any, files: Any) -> Path:
        assert set(files) == {CONFIG_NAME, WEIGHTS_NAME}
        return Path(str(cache)) / name

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    monkeypatch.setattr(sources, "snapshot", snapshot)
    source = AdapterSource("org/sql@v1", "org/sql@v1", is_hub=True)
    assert fetch(source, 100, "/cache") == Path("/cache/org/sql@v1")
    with pytest.raises(AdapterError, match="has 100 bytes, which is more than an adapt"):
        fetch(source, 99, "/cache")
    assert asked == [("org/sql", "v1")] * 2


def test_without_the_hub_its_cache_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class Api:
        def model_info(self, *_: Any, **__: Any) -> Any:
            raise httpx.ConnectError("no network")

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    monkeypatch.setattr(sources, "snapshot", lambda *_, **__: Path("/cache/sql"))
    source = AdapterSource("org/sql@v1", "org/sql@v1", is_hub=True)
    assert fetch(source, 100, None) == Path("/cache/sql")

"""Adapters between files and slots: which are kept, and what a failure says."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from minfer.effects.execution.contract import ReportLoad
from minfer.effects.live.adapters.registry import AdapterEntry, AdapterRegistry
from minfer.effects.live.engine.host_adapters import HostAdapters
from minfer.effects.models.adapters.peft_config import AdapterError
from minfer.records.messages import AdapterFailed, AdapterLoaded, LoadAdapter
from tests.effects.live.adapters.test_adapter_files import WEIGHTS, make_files
from tests.effects.waiting import until


class Executor:
    """Remembers what it was told; loads end once they may."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []
        self.kept: set[str] = set()
        self.go = threading.Event()
        self.go.set()
        self.pending: list[tuple[LoadAdapter, ReportLoad]] = []

    def add_adapter(self, digest: bytes, folder: str) -> None:
        name = digest.hex()
        self.told.append(("add", name))
        if (Path(folder) / "adapter_model.safetensors").read_bytes() != WEIGHTS:
            raise AdapterError(f"{folder}: its digest is another one")
        self.kept.add(name)

    def remove_adapter(self, digest: bytes) -> None:
        self.told.append(("remove", digest.hex()))
        self.kept.remove(digest.hex())

    def load_adapter(self, command: LoadAdapter, report: ReportLoad) -> None:
        assert command.adapter in self.kept
        self.told.append(("load", command.adapter))
        if self.go.is_set():
            report(AdapterLoaded(command.adapter, command.slot))
        else:
            self.pending.append((command, report))


@pytest.fixture
def names(tmp_path: Path) -> AdapterRegistry:
    made = AdapterRegistry(tmp_path / "names")
    for digest in ("0a", "0b", "0c"):
        folder = str(make_files(tmp_path / digest))
        made.add(
            AdapterEntry(
                name=f"name-{digest}",
                digest=digest,
                folder=folder,
                origin="x",
                rank=1,
                size=7,
            )
        )
    return made


@pytest.fixture
def executor() -> Executor:
    return Executor()


@pytest.fixture
def adapters(executor: Executor, names: AdapterRegistry) -> Iterator[HostAdapters]:
    made = HostAdapters(executor, names, 2, 100)
    yield made
    made.close()


def load(adapters: HostAdapters, digest: str) -> AdapterLoaded | AdapterFailed:
    reports: list[AdapterLoaded | AdapterFailed] = []
    adapters.load(LoadAdapter(digest, 3), reports.append)
    until(lambda: bool(reports))
    return reports[0]


def test_the_last_used_are_kept(adapters: HostAdapters, executor: Executor) -> None:
    for digest in ("0a", "0b", "0a", "0c"):
        assert load(adapters, digest) == AdapterLoaded(digest, 3)
    until(lambda: executor.kept == {"0a", "0c"})
    adds = [name for verb, name in executor.told if verb == "add"]
    assert adds == ["0a", "0b", "0c"]  # a second load of one reads no files
    assert load(adapters, "0b") == AdapterLoaded("0b", 3)
    until(lambda: executor.kept == {"0b", "0c"})


def test_what_is_being_loaded_stays(adapters: HostAdapters, executor: Executor) -> None:
    executor.go.clear()
    for slot, digest in enumerate(("0a", "0b", "0c")):
        adapters.load(LoadAdapter(digest, slot), lambda _: None)
    until(lambda: len(executor.pending) == 3)
    assert executor.kept == {"0a", "0b", "0c"}
    adapters.forget("0a")
    for command, report in executor.pending:
        report(AdapterLoaded(command.adapter, command.slot))
    adapters.forget("0c")
    adapters.forget("ff")  # not here
    until(lambda: "0c" not in executor.kept)
    assert {"0a", "0b"} >= executor.kept


def test_failures_say_what_is_wrong(
    adapters: HostAdapters, names: AdapterRegistry, executor: Executor, tmp_path: Path
) -> None:
    (tmp_path / "0a" / "adapter_model.safetensors").write_bytes(bytes(8) + b"others")
    failed = load(adapters, "0a")
    assert failed == AdapterFailed(
        "0a", 3, f"{tmp_path / '0a'}: its digest is another one"
    )
    (tmp_path / "0b" / "adapter_config.json").unlink()
    failed = load(adapters, "0b")
    assert isinstance(failed, AdapterFailed)
    assert "there is no adapter_config.json" in failed.error
    failed = load(adapters, "ff")
    assert isinstance(failed, AdapterFailed)
    assert "its folder is not known any more; load it again" in failed.error
    names.remove("name-0c")  # its folder is known all the same
    assert load(adapters, "0c") == AdapterLoaded("0c", 3)
    assert executor.kept == {"0c"}


def test_an_error_that_nobody_expected_is_a_failure(
    adapters: HostAdapters, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(executor, "load_adapter", broken)
    assert load(adapters, "0a") == AdapterFailed("0a", 3, "ZeroDivisionError()")

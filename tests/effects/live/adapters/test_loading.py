"""Loads while requests are served: each once, few at once, nobody's alone."""

import threading
from collections.abc import Iterator

import pytest
from attrs import evolve

from minfer.effects.live.adapters.loading import (
    FAILED_SECONDS,
    MAX_FAILURES,
    MAX_LOADS,
    MAX_UNFINISHED,
    AdapterLoads,
)
from minfer.effects.live.adapters.registry import AdapterEntry
from minfer.effects.live.errors import OverloadedError
from tests.effects.waiting import until

ENTRY = AdapterEntry(name="a", digest="ab", folder="/a", origin="a", rank=1, size=1)


class Loads(AdapterLoads):
    """Loads that end once they may, on a clock of their own."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(lambda: self.now)
        self.go = threading.Event()
        self.begun: list[str] = []
        self.most = 0  # at once
        self.inside = 0

    def load(self, name: str) -> AdapterEntry:
        self.begun.append(name)
        self.inside += 1
        self.most = max(self.most, self.inside)
        assert self.go.wait(60)
        self.inside -= 1
        if name.startswith("bad"):
            raise ValueError(name)
        return evolve(ENTRY, name=name)


@pytest.fixture
def loads() -> Iterator[Loads]:
    made = Loads()
    yield made
    made.go.set()
    made.close()


def test_requests_for_one_name_share_a_load(loads: Loads) -> None:
    first = loads.begin("a", "ann", lambda: loads.load("a"))
    assert loads.begin("a", "bob", lambda: loads.load("a")) is first
    with pytest.raises(OverloadedError, match="'a' is being loaded; try again later"):
        loads.begin_new("a", "root", lambda: loads.load("a"))
    loads.go.set()
    assert first.result(60).name == "a"
    until(lambda: loads.begin("a", "ann", lambda: ENTRY) is not first)
    assert loads.begun == ["a"]


def test_few_run_and_a_client_has_half_of_those_that_wait(loads: Loads) -> None:
    names = [f"{number}" for number in range(MAX_UNFINISHED)]
    for name in names[: MAX_UNFINISHED // 2]:
        loads.begin(name, "ann", lambda name=name: loads.load(name))  # type: ignore[misc]  # it has a default
    with pytest.raises(OverloadedError, match="too many adapters are being loaded"):
        loads.begin("more", "ann", lambda: ENTRY)
    for name in names[MAX_UNFINISHED // 2 :]:
        loads.begin(name, name, lambda name=name: loads.load(name))  # type: ignore[misc]  # it has a default
    with pytest.raises(OverloadedError, match="try again later"):
        loads.begin("more", "bob", lambda: ENTRY)
    loads.go.set()
    until(lambda: len(loads.begun) == MAX_UNFINISHED)
    until(lambda: not loads.inside)
    assert loads.most == MAX_LOADS
    until(lambda: not loads._unfinished)
    assert loads.begin("more", "ann", lambda: ENTRY).result(60) == ENTRY


def test_what_failed_is_not_tried_again_at_once(loads: Loads) -> None:
    loads.go.set()
    failed = loads.begin("bad", "ann", lambda: loads.load("bad"))
    with pytest.raises(ValueError, match="bad"):
        failed.result(60)
    until(lambda: not loads._unfinished)
    for _ in range(3):
        with pytest.raises(ValueError, match="bad"):
            loads.begin("bad", "bob", lambda: loads.load("bad"))
    assert loads.begun == ["bad"]
    assert loads.begin_new("bad", "root", lambda: ENTRY).result(60) == ENTRY
    until(lambda: not loads._unfinished)
    assert loads.begin("bad", "ann", lambda: ENTRY).result(60) == ENTRY  # it was mended
    loads.begin("bad 2", "ann", lambda: loads.load("bad 2"))
    until(lambda: not loads._unfinished)
    loads.now += FAILED_SECONDS
    assert loads.begin("bad 2", "ann", lambda: ENTRY).result(60) == ENTRY


def test_an_error_of_an_administrator_is_not_that_of_clients(loads: Loads) -> None:
    loads.go.set()
    failed = loads.begin_new("bad", "root", lambda: loads.load("bad"))
    with pytest.raises(ValueError, match="bad"):
        failed.result(60)
    until(lambda: not loads._unfinished)
    assert loads.begin("bad", "ann", lambda: ENTRY).result(60) == ENTRY


def test_few_failures_are_remembered(loads: Loads) -> None:
    loads.go.set()
    for number in range(MAX_FAILURES + 5):
        loads.begin(f"bad {number}", "ann", lambda: loads.load("bad"))
        until(lambda: not loads._unfinished)
    assert len(loads._failures) == MAX_FAILURES

"""Rounds go on where they were, end in time, and give each engine its turn."""

import argparse
import random
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from attrs import define, field

from bench import speculation_speed
from bench.speculation_cases import PLAIN, Case, Part, Way, parts, speculative_config
from bench.speculation_speed import (
    WARM,
    Results,
    Rounds,
    Session,
    figures,
    measured,
    restricted,
)

WAYS = {PLAIN: Way(), "drafts": Way(speculative_config("ngram", adaptive=False))}


@define
class Requested(Session):
    """Engines that take a while, and note who was asked."""

    seconds: float = 0.0
    now: float = 0.0
    requested: list[tuple[int, bool]] = field(factory=list)

    def ask(self, case: Case, way: Way, number: int) -> float:
        del case
        self.requested.append((number, way.config is None))
        self.now += self.seconds
        return 10.0 if way.config is None else 15.0 + number


def case() -> Case:
    return Case(prompts=lambda _: [[1]], tokens=3, ways=WAYS)


def rounds(room: Session, rates: dict[str, list[float]], seconds: float) -> Rounds:
    return Rounds(room, case(), rates, time.monotonic() + seconds)


def test_first_rounds_do_not_count_and_none_is_always_first() -> None:
    room = Requested(Part({}, {}))
    rates: dict[str, list[float]] = {name: [] for name in WAYS}
    saved_counts = list[int]()
    assert rounds(room, rates, 60).go_on(
        3, lambda: saved_counts.append(len(rates[PLAIN]))
    )
    assert saved_counts == [1, 2, 3]
    assert len(room.requested) == 2 * (WARM + 3)
    assert {plain for _, plain in room.requested[::2]} == {True, False}
    assert rates["drafts"] == [15.0 + WARM + i for i in range(3)]
    ratio = figures(rates)["drafts"]["ratio"]
    assert (ratio["median"], ratio["repetitions"]) == (1.5 + (WARM + 1) / 10, 3)
    # ... and a second call has nothing to do.
    requested = len(room.requested)
    assert rounds(room, rates, 60).go_on(3, saved_counts.clear)
    assert len(room.requested) == requested


@pytest.mark.parametrize(("end", "number"), [(284.5, 7 - WARM), (283.5, 6 - WARM)])
def test_no_round_begins_that_would_not_end_in_time(
    monkeypatch: pytest.MonkeyPatch, end: float, number: int
) -> None:
    """Each takes 40 seconds, and may take a tenth longer."""
    room = Requested(Part({}, {}), seconds=20.0)
    clock = SimpleNamespace(monotonic=lambda: room.now)
    monkeypatch.setattr(speculation_speed, "time", clock)
    rates: dict[str, list[float]] = {name: [] for name in WAYS}
    assert not Rounds(room, case(), rates, end).go_on(1000, lambda: None)
    assert room.now <= end
    assert len(rates[PLAIN]) == len(rates["drafts"]) == number


@pytest.mark.long
def test_another_call_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation_speed, "Session", Requested)
    monkeypatch.setattr(speculation_speed, "write", _written)
    workload = Part({}, {"one": case(), "two": case()})
    args = argparse.Namespace(name="x", folder=tmp_path, pairs=2, ways="")
    results = Results.of(args)
    assert measured(workload, "part", results, time.monotonic() + 60)
    reread = Results.of(args)
    assert reread.rates == results.rates
    assert {
        len(r)
        for case_rates in reread.rates["part"].values()
        for r in case_rates.values()
    } == {2}


def _written(name: str, data: object, seed: None, folder: Path) -> None:
    import json

    del seed
    (folder / f"{name}.json").write_text(json.dumps({"results": data}))


@pytest.mark.long
@pytest.mark.parametrize("name", ["set", "circle"])
def test_shapes_are_those_of_the_pair(tmp_path: Path, name: str) -> None:
    workload = parts(tmp_path, "7B", "cuda")[name]()
    assert [*workload.cases] == [f"batch {batch}" for batch in (1, 8, 32, 64)]
    largest = workload.cases["batch 64"]
    prompts = largest.prompts(random.Random(0))
    assert [len(prompt) for prompt in prompts] == [512] * 64
    assert largest.tokens == 256
    assert len(largest.ways) == (7 if name == "set" else 3)


def test_some_ways_are_measured_by_themselves() -> None:
    ways = {
        PLAIN: Way(),
        "4 drafts": Way(),
        "adaptive, 0.5": Way(),
        "adaptive, 0.7": Way(),
    }
    case = Case(prompts=lambda _: [], tokens=1, ways=ways)
    assert [*restricted(case, "adaptive").ways] == [PLAIN, *list(ways)[2:]]
    assert restricted(case, "") == case

"""Whatever happens to engines and links, a front's requests get what they would get."""

from pathlib import Path
from random import Random

import pytest
from attrs import evolve

from minfer.effects.live.errors import DrainingError, EngineDeadError, RequestError
from minfer.effects.live.journal_writer import Writer
from minfer.effects.live.link import messages as wire
from minfer.effects.live.link.remote import Remote
from minfer.request import Request
from tests.circles import seeds
from tests.effects.live.link.world import CONFIG, World


@seeds(30, 600)
def test_nobody_loses_anything_whatever_happens(seeds: range) -> None:
    deaths = ended = 0
    for seed in seeds:
        world = World(seed, fronts=Random(seed).choice((1, 2, 3)))
        world.run(600)
        world.judge()
        deaths += world.deaths
        ended += sum(len(front.ended) for front in world.fronts)
    assert deaths > len(seeds), "the worlds are not as hostile as they should be"
    assert ended > 10 * len(seeds)


@seeds(6, 60)
def test_a_request_that_kills_ends_alone(seeds: range) -> None:
    for seed in seeds:
        world = World(seed, poison="bad")
        world.ask(
            world.fronts[0], evolve(world.any_request(), id="bad", n=1, max_tokens=9)
        )
        world.run(300)
        world.judge()
        assert world.fronts[0].ended["bad", 0].error.startswith("the engine died 2 times")
        wrong = [
            name
            for front in world.fronts
            for name, done in front.ended.items()
            if done.reason == "error"
        ]
        assert wrong == [("bad", 0)]


def request(name: str = "a") -> Request:
    return Request(id=name, prompt=(1, 2, 3), max_tokens=4)


def test_what_is_refused_is_refused_at_once() -> None:
    remote = Remote()
    remote.submit([request()])
    with pytest.raises(RequestError, match="ids must differ"):
        remote.submit([request()])
    remote.draining = True
    with pytest.raises(DrainingError):
        remote.check(request("b"))
    remote.close()
    with pytest.raises(EngineDeadError):
        remote.check(request("b"))


def test_without_an_engine_requests_wait_and_what_is_cancelled_ends_at_once() -> None:
    remote = Remote()
    heard: list[object] = []
    said: list[object] = []
    remote.listen(heard.append)
    remote.submit([request("a"), request("b")])
    remote.cancel(["a"])
    assert [done.reason for done in heard[0].finished] == ["cancelled"]  # type: ignore[attr-defined]  # it is News
    remote.connect(said.append)
    (hello,) = said
    assert isinstance(hello, wire.Hello)
    assert [one.request.prompt for one in hello.resumed] == [(1, 2, 3)]
    assert remote.unready == "connecting"
    remote.receive(wire.Progress("loading weights", 3, 9))
    assert remote.unready == "loading weights (3 of 9)"
    remote.receive(wire.Ready("cpu", 9, b""))
    assert not remote.unready


def test_a_reset_of_the_cache_is_not_forgotten_by_the_next_engine() -> None:
    world = World(0, fronts=2)
    for _ in range(40):
        world.move(hostile=False)
    first, second = (front.remote for front in world.fronts)
    first.reset_cache()
    for _ in range(200):
        world.move(hostile=False)
    assert (first.resets, second.resets) == (1, 1)
    world.kill()
    for _ in range(200):
        world.move(hostile=False)
    second.reset_cache()
    for _ in range(200):
        world.move(hostile=False)
    assert (first.resets, second.resets) == (2, 2)


def test_a_front_knows_whether_the_engine_writes_its_journal(tmp_path: Path) -> None:
    world = World(0, fronts=1)
    remote = world.fronts[0].remote
    assert remote.snapshot().journal_writing is None
    for _ in range(200):
        world.move(hostile=False)
    assert world.engine is not None
    world.engine.journal = journal = Writer(tmp_path, CONFIG, {})
    journal.failed, journal.errors = OSError(), 3
    for _ in range(200):
        world.move(hostile=False)
    now = remote.snapshot()
    assert (now.journal_writing, now.journal_errors) == (False, 3)
    journal.close(world.engine.driver.state)

"""Whatever happens to engines and links, an API server's requests get what they would
get.
"""

from random import Random

import pytest
from attrs import evolve

from minfer.effects.cluster.engine_client.remote_engine import RemoteEngine
from minfer.effects.cluster.link import link_messages as wire
from minfer.effects.cluster.link.crash_rule import (
    CLEARING_TOKENS,
    GIVEN_UP,
    MAX_SOLO_DEATHS,
    SUSPECT_DEATHS,
    EndKind,
    EngineEnd,
)
from minfer.effects.live.client import EngineMessage, TurnOutputs
from minfer.effects.live.errors import (
    DrainingError,
    EngineDeadError,
    OverloadedError,
    RequestError,
)
from minfer.records.request import SamplingParams
from tests.circles import seeds
from tests.effects.cluster.ends import IDLE, READY, linked, names_of, request
from tests.effects.cluster.world import Poison, World


@pytest.mark.long
@seeds(20, 600)
def test_no_request_loses_anything_whatever_happens(seeds: range) -> None:
    deaths = ended = 0
    for seed in seeds:
        world = World(seed, api_servers=Random(seed).choice((1, 2, 3)))
        world.run(600)
        world.judge()
        deaths += world.deaths
        ended += sum(len(api_server.ended) for api_server in world.api_servers)
    assert deaths > len(seeds), "the worlds are not as hostile as they should be"
    assert ended > 10 * len(seeds)


@pytest.mark.long
@pytest.mark.parametrize("compiles", [False, True], ids=["runs", "compiles"])
@seeds(6, 60)
def test_a_request_that_kills_ends_without_the_others(
    seeds: range, *, compiles: bool
) -> None:
    for seed in seeds:
        world = World(seed, poison="bad")
        params = world.constrained("bad") if compiles else SamplingParams()
        bad = evolve(world.any_request(), id="bad", n=1, max_tokens=9, sampling=params)
        world.ask(world.api_servers[0], bad)
        world.run(300)
        world.judge()
        assert world.api_servers[0].ended["bad", 0].error.startswith(GIVEN_UP)
        wrong = [
            name
            for api_server in world.api_servers
            for name, end in api_server.ended.items()
            if end.reason == "error"
        ]
        assert wrong == [("bad", 0)]


KILLS_FROM_OUTSIDE = 45
KILLS = {
    "prefill": Poison("bad"),
    "a token after each start": Poison("bad", after=1),
    "a few tokens after each start": Poison("bad", after=4),
    "as many as do not clear it": Poison("bad", after=CLEARING_TOKENS),
    "a token": Poison("bad", at=3),
    "a late token": Poison("bad", at=2 * CLEARING_TOKENS),
    "many tokens after each start": Poison("bad", after=2 * CLEARING_TOKENS),
}


@pytest.mark.long
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("kills", KILLS.values(), ids=KILLS)
@seeds(3, 40)
def test_a_request_that_kills_costs_few_engines(
    seeds: range, kills: Poison, n: int
) -> None:
    """All get the right tokens but the request that is the cause, whose error says so. At
    most two engines die while they serve others.
    """
    for seed in seeds:
        poison = kills if n == 1 else evolve(kills, sample=Random(seed).choice((None, 2)))
        world = World(seed, poison="bad", kills=poison)
        bad = evolve(
            world.any_request(),
            id="bad",
            n=n,
            prompt=(1, 2, 3),
            max_tokens=60,
            sampling=SamplingParams(),
            stop_ids=frozenset(),
        )
        requests = [evolve(world.any_request(), id=f"r{i}") for i in range(6)]
        requests.insert(Random(seed).randrange(6), bad)
        for number, new_request in enumerate(requests):
            world.ask(world.api_servers[number % 2], new_request)
        world.run(0)
        world.judge()
        assert world.deaths <= 3
        assert world.beside <= 2
        ends = [
            end for api_server in world.api_servers for end in api_server.ended.values()
        ]
        wrong = [end for end in ends if end.reason == "error"]
        assert {end.id for end in wrong} == {"bad"}
        assert all("the request itself is the cause" in end.error for end in wrong)


@pytest.mark.parametrize("end", [EndKind.OUT_OF_MEMORY, EndKind.HUNG])
@seeds(3, 40)
def test_a_request_that_has_engines_killed_ends_after_several(
    seeds: range, end: EndKind
) -> None:
    """All others get the right tokens."""
    for seed in seeds:
        world = World(seed, poison="bad", kills=Poison("bad", end=end))
        world.ask(world.api_servers[0], evolve(world.any_request(), id="bad", n=1))
        for number in range(4):
            world.ask(world.api_servers[number % 2], world.any_request())
        world.run(0)
        world.judge()
        assert world.api_servers[0].ended["bad", 0].error.startswith(GIVEN_UP)
        assert world.deaths == SUSPECT_DEATHS + MAX_SOLO_DEATHS
        assert world.beside <= 2


@seeds(4, 40)
def test_kills_from_outside_blame_nobody(seeds: range) -> None:
    """However often engines are killed soon after they started, while a suspect runs
    alone.
    """
    num_alone = 0
    for seed in seeds:
        rng = Random(f"outside {seed}")
        world = World(seed)
        for number in range(6):
            request = evolve(world.any_request(), max_tokens=40, stop_ids=frozenset())
            world.ask(world.api_servers[number % 2], request)
        for _ in range(KILLS_FROM_OUTSIDE):
            for _ in range(rng.randint(50, 150)):
                world.move(hostile=False)
            world.kill()
        world.run(0)
        world.judge()
        ends = [
            end for api_server in world.api_servers for end in api_server.ended.values()
        ]
        assert not any(end.reason == "error" for end in ends)
        num_alone += max(world.solo.values(), default=0) > MAX_SOLO_DEATHS
    assert num_alone, (
        "no request was alone in as many engines as would end it after crashes"
    )


def test_a_broken_link_is_no_engines_end() -> None:
    """The end of an engine before that is not counted twice."""
    remote = RemoteEngine(last_end=lambda _: EngineEnd(EndKind.CRASHED, 1))
    heard = list[EngineMessage]()
    remote.listen(heard.append)
    remote.connect(lambda _: None)
    remote.receive(READY)
    remote.submit([request("a")])
    for _ in range(MAX_SOLO_DEATHS + 1):
        (name,) = names_of(remote)
        remote.receive(wire.ProbingRequest(name))
        remote.disconnect()
        remote.connect(lambda _: None)
        remote.receive(READY)
    assert not heard


def test_the_first_message_on_a_link_is_a_hello_also_if_a_request_is_given_up() -> None:
    ends = list[EngineEnd]([EngineEnd()])
    remote = RemoteEngine(last_end=lambda _: ends[-1])
    sent, heard = list[wire.ToEngine](), list[EngineMessage]()
    remote.listen(heard.append)
    remote.connect(lambda _: None)
    remote.receive(READY)
    remote.submit([request("a")])
    remote.receive(wire.ProbingRequest("a"))
    remote.disconnect()
    ends.append(EngineEnd(EndKind.CRASHED, 1))
    remote.connect(sent.append)
    (hello,) = sent
    assert isinstance(hello, wire.ApiServerHello)
    assert not hello.resumed
    assert [crashing.engines for crashing in hello.crashing] == [1]
    (outputs,) = heard
    assert isinstance(outputs, TurnOutputs)
    assert [end.reason for end in outputs.finished] == ["error"]


def test_a_listener_that_fails_harms_neither_the_link_nor_other_listeners(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(_: EngineMessage) -> None:
        raise KeyError("a fault")

    ends = linked()
    (remote,) = ends.remotes
    remote._listeners.insert(0, broken)
    remote.submit([request("a"), request("b")])
    ends.carry()
    remote.cancel(["a"])
    ends.cut()
    (outputs,) = ends.heard[0]
    assert isinstance(outputs, TurnOutputs)
    assert [(end.id, end.reason) for end in outputs.finished] == [("a", "cancelled")]
    assert "Traceback" in caplog.text
    ends.link()
    ends.carry()
    assert names_of(remote) == ["b#1"], "the other one goes on"
    remote.cancel(["b"])
    ends.cut()
    assert not remote.working


def test_what_is_refused_is_refused_at_once() -> None:
    remote = RemoteEngine()
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
    remote = RemoteEngine()
    heard: list[object] = []
    emitted: list[object] = []
    remote.listen(heard.append)
    remote.submit([request("a"), request("b")])
    remote.cancel(["a"])
    assert [end.reason for end in heard[0].finished] == ["cancelled"]  # type: ignore[attr-defined]  # it is News
    remote.connect(emitted.append)
    (hello,) = emitted
    assert isinstance(hello, wire.ApiServerHello)
    assert [entry.request.prompt for entry in hello.resumed] == [(1, 2, 3)]
    assert remote.unready == "connecting"
    remote.receive(wire.LoadingProgress("loading weights", 3, 9))
    assert remote.unready == "loading weights (3 of 9)"
    remote.receive(wire.EngineReady("cpu", 9, b""))
    assert not remote.unready


def test_a_reset_of_the_cache_is_not_forgotten_by_the_next_engine() -> None:
    world = World(0, api_servers=2)
    for _ in range(40):
        world.move(hostile=False)
    first, second = (api_server.remote for api_server in world.api_servers)
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


def test_an_engine_that_is_not_there_does_not_stall_and_its_line_has_an_end() -> None:
    ends = linked()
    (remote,) = ends.remotes
    remote.max_waiting = 3
    ends.engine.state = evolve(IDLE, waiting=3, stalled=99.0, failing=9)
    ends.host.tick()
    ends.carry()
    assert (remote.snapshot().stalled, remote.snapshot().failing) == (99.0, 9)
    with pytest.raises(OverloadedError, match="3 samples wait already, of at most 3"):
        remote.check(request("b"))
    ends.cut()
    ends.engine.now = 1000.0
    assert (remote.snapshot().stalled, remote.snapshot().failing) == (0.0, 0)
    remote.submit([request("a"), evolve(request("b"), n=2)])
    with pytest.raises(OverloadedError):
        remote.check(request("c"))
    remote.cancel(["b"])
    remote.check(request("c"))


def test_an_engine_that_sends_nothing_any_more_stalls_if_requests_wait() -> None:
    ends = linked()
    (remote,) = ends.remotes
    ends.host.tick()
    ends.carry()
    ends.engine.now += 50.0
    assert remote.snapshot().stalled == 0.0
    remote.submit([request("a")])
    assert remote.snapshot().stalled == 50.0


def test_a_request_is_given_up_at_the_length_that_it_has() -> None:
    ends = linked()
    ends.remotes[0].submit([evolve(request("a"), output=(1, 2))])
    for _ in range(3 * SUSPECT_DEATHS):
        if not ends.remotes[0].working:
            break
        ends.engine.admit(*names_of(ends.remotes[0]))
        ends.carry()
        ends.cut()
        ends.engine.served.clear()
        ends.link()
        ends.carry()
    (news,) = [
        message
        for message in ends.heard[0]
        if isinstance(message, TurnOutputs) and message.finished
    ]
    assert [(end.reason, end.length) for end in news.finished] == [("error", 2)]


def test_what_comes_after_the_end_of_a_link_leaves_nothing_behind() -> None:
    ends = linked()
    (remote,) = ends.remotes
    for number in range(20):
        remote.submit([evolve(request(str(number)), n=2)])
        ends.cut()
        ends.link()
        remote.cancel([str(number)])
        ends.cut()  # cancelled while the link was up, and it never came to be
        ends.link()
        ends.carry()
    assert not remote.live


def test_ready_is_sent_twice_and_a_hello_once_a_link() -> None:
    ends = linked()
    ends.open()
    ends.carry()
    assert not ends.remotes[0].unready
    assert ends.remotes[0].links == 1

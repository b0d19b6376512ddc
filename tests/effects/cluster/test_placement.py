"""Several engines: whichever of them dies, and whatever is moved, a request gets what one
engine would give it.
"""

import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from attrs import evolve

from minfer.blocks.keys import block_keys
from minfer.effects.cluster.engine_client.api_server_router import ApiServerRouter
from minfer.effects.cluster.engine_client.remote_engine import RemoteEngine
from minfer.effects.cluster.engine_client.replica_link import (
    MAX_FAILED_LOADS,
    RESTART_SECONDS,
)
from minfer.effects.cluster.link import link_messages as wire
from minfer.effects.cluster.link.crash_rule import GIVEN_UP, SUSPECT_DEATHS
from minfer.effects.live.client import EngineMessage, TurnOutputs
from minfer.effects.live.journal.routing_journal_file import RoutingJournalFile
from minfer.journal.routing_journal import RoutingJournal
from minfer.records.messages import Admitted, Finish, Finished
from minfer.records.request import Request, SamplingParams
from minfer.routing.key_index import holders
from minfer.routing.messages import RequestsLost
from minfer.routing.policies import ROUTING_POLICIES, Prefix, routing_policy_named
from minfer.routing.replica_events import content_keys
from minfer.routing.state import RouterConfig
from tests.circles import seeds
from tests.effects.cluster import world as worlds
from tests.effects.cluster.ends import IDLE, READY, request
from tests.effects.cluster.test_remote_engine import KILLS
from tests.effects.cluster.world import CONFIG, Frontend, Poison, World

ALL = tuple(ROUTING_POLICIES)


def settle(world: World, condition: Callable[[], bool], max_moves: int = 20_000) -> None:
    """Let time pass until something is so."""
    for _ in range(max_moves):
        if condition():
            return
        world.move(hostile=False)
    raise AssertionError("it never was so")


def made_ready(world: World) -> World:
    """The world, once all engines are ready, and all API servers know that."""
    replicas = [
        one for api_server in world.api_servers for one in api_server.remote.replicas
    ]
    settle(world, lambda: not any(replica.unready for replica in replicas))
    return world


def started(replicas: int = 3, api_servers: int = 1, policy: str = "prefix") -> World:
    return made_ready(World(0, api_servers=api_servers, replicas=replicas, policy=policy))


def quiet(world: World) -> bool:
    """Whether nothing is served, and all that was said has arrived."""
    links = [
        link for api_server in world.api_servers for link in api_server.links.values()
    ]
    busy = any(api_server.remote.working for api_server in world.api_servers)
    return not busy and not any(link.up or link.down for link in links)


def prompted(name: str, *prompt: int, tokens: int = 20) -> Request:
    return Request(id=name, prompt=prompt, max_tokens=tokens)


def where(api_server: Frontend, name: str) -> int | None:
    record = api_server.remote._requests.get(name)
    return None if record is None else record.replica


def test_the_requests_of_an_engine_that_died_find_room_at_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However long the line is: they were taken before."""
    monkeypatch.setattr(worlds, "CONFIG", evolve(CONFIG, max_waiting=2, max_num_seqs=1))
    world = started(replicas=2, policy="round_robin")
    [api_server] = world.api_servers
    names = "abcdef"
    for name in names:
        world.ask(api_server, prompted(name, 1, 2, ord(name) - 97))
        world.move(hostile=False)
    settle(world, lambda: not any(one.up for one in api_server.links.values()))
    world.kill(0)
    settle(world, lambda: not api_server.remote.working)
    assert [api_server.ended[name, 0].reason for name in names] == ["length"] * len(names)


# --- whatever happens -------------------------------------------------------------------


@pytest.mark.long
@seeds(5, 300)
def test_no_request_loses_anything_whichever_engine_dies(seeds: range) -> None:
    deaths = resumed = 0
    for seed in seeds:
        rng = Random(seed)
        world = World(
            seed,
            api_servers=rng.choice((1, 2, 3)),
            replicas=rng.choice((2, 3)),
            policy=rng.choice(ALL),
        )
        world.run(600)
        world.judge()
        deaths += world.deaths
        for api_server in world.api_servers:
            router = api_server.remote._router
            assert router is not None
            assert not router.state.requests, "ended ones are on no replica"
            assert not api_server.remote._requests.unplaced
            sent = api_server.remote.sent
            resumed += sum(n for cause, n in sent.items() if "resumed" in cause)
    assert deaths > len(seeds)
    assert resumed > len(seeds)


@pytest.mark.long
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("kills", KILLS.values(), ids=KILLS)
@pytest.mark.parametrize("replicas", [2, 3])
@seeds(1, 30)
def test_a_request_that_kills_ends_alone_and_spares_other_replicas(
    seeds: range, replicas: int, kills: Poison, n: int
) -> None:
    """At most two engines die while they serve others, and at any time one serves."""
    for seed in seeds:
        rng = Random(seed)
        poison = kills if n == 1 else evolve(kills, sample=rng.choice((None, 2)))
        policy = rng.choice(ALL)
        world = World(seed, 2, "bad", poison, replicas=replicas, policy=policy)
        made_ready(world)
        bad = evolve(
            world.any_request(),
            id="bad",
            n=n,
            prompt=(1, 2, 3),
            max_tokens=60,
            sampling=SamplingParams(),
            stop_ids=frozenset(),
        )
        requests = [evolve(world.any_request(), id=f"r{i}") for i in range(10)]
        requests.insert(rng.randrange(6), bad)
        for number, new_request in enumerate(requests):
            world.ask(world.api_servers[number % 2], new_request)
        world.run(0)
        world.judge()
        assert world.deaths <= 3
        assert world.beside <= 2
        assert world.outages == 0
        ends = [
            end for api_server in world.api_servers for end in api_server.ended.values()
        ]
        wrong = [end for end in ends if end.reason == "error"]
        assert {end.id for end in wrong} == {"bad"}
        assert all(end.error.startswith(GIVEN_UP) for end in wrong)


# --- where requests go ------------------------------------------------------------------


def test_a_prompt_that_comes_again_goes_to_the_replica_that_has_it() -> None:
    world = started()
    (api_server,) = world.api_servers
    prompt = tuple(range(16))
    keyed = evolve(
        prompted("a", *prompt), keys=block_keys(b"", prompt, CONFIG.block_size)
    )
    world.ask(api_server, keyed)
    first = where(api_server, "a")
    settle(world, lambda: quiet(world))
    for replica in world.replicas:  # what the engines have not sent yet
        assert replica.host is not None
        replica.host.tick()
    settle(world, lambda: quiet(world))
    for number in range(4):
        world.ask(api_server, evolve(keyed, id=f"b{number}"))
        (sending,) = api_server.remote.live[f"b{number}"].sendings
        placed = sending.placed
        assert (int(placed.replica), placed.hit, placed.why) == (first, 4, "cost")
        settle(world, lambda: quiet(world))


def test_a_replica_that_is_there_again_takes_load_again() -> None:
    world = started(2, policy="least_loaded")
    (api_server,) = world.api_servers
    world.kill(0)
    for number in range(4):
        world.ask(api_server, prompted(f"a{number}", number))
    assert {where(api_server, f"a{number}") for number in range(4)} == {1}
    settle(world, lambda: not api_server.remote.replicas[0].unready)
    for number in range(4):
        world.ask(api_server, prompted(f"b{number}", number))
    assert {where(api_server, f"b{number}") for number in range(4)} == {0}
    world.run(0)
    world.judge()


def test_without_a_replica_requests_wait_and_all_of_them_are_served() -> None:
    world = World(0, api_servers=1, replicas=2)
    (api_server,) = world.api_servers
    for number in range(6):
        world.ask(api_server, prompted(f"a{number}", number))
    api_server.remote.cancel(["a5"])
    assert api_server.ended["a5", 0].reason == "cancelled"
    assert len(api_server.remote._requests.unplaced) == 5
    now = api_server.remote.snapshot()
    assert (now.waiting, now.waiting_for) == (5, {"replica": 5})
    world.run(0)
    world.judge()


def test_a_request_that_is_deferred_waits_until_one_of_its_tenant_starts() -> None:
    ends = Links(2, Prefix(least=0, patience=0.0))
    for client in "xy":
        requests = [
            evolve(request(f"{client}{number}"), client=client) for number in range(2)
        ]
        ends.remote.submit(requests)
    ends.remote.submit([evolve(request("late"), client="x")])
    assert ends.submitted() == [["x0", "y0"], ["x1", "y1"]]
    assert list(ends.remote._requests.unplaced) == ["late"]
    ends.hear(1, wire.ApiServerOutputs(1.0, ids=(("x1", 0),), tokens=((7,),)))
    assert not ends.remote._requests.unplaced
    assert ends.submitted() == [["x0", "y0"], ["x1", "y1", "late"]]


# --- moves ------------------------------------------------------------------------------


class Links:
    """An API server with links to engines that are ready, and say what they are
    told to.
    """

    def __init__(
        self,
        replicas: int,
        policy: object,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        router = ApiServerRouter(RouterConfig(policy, 4))
        self.remote = RemoteEngine(replicas=replicas, router=router, clock=clock)
        self.heard: list[EngineMessage] = []
        self.remote.listen(self.heard.append)
        self.sent: list[list[wire.ToEngine]] = [[] for _ in range(replicas)]
        for number in range(replicas):
            self.link(number)

    def link(self, number: int) -> None:
        self.sent[number] = []
        self.remote.connect(self.sent[number].append, number)
        self.hear(number, READY)

    def hear(self, number: int, message: wire.ToApiServer) -> None:
        self.remote.receive(message, number)

    def submitted(self) -> list[list[str]]:
        """The requests that each engine was asked for, by their names there."""
        batches = [
            [message for message in sent if isinstance(message, wire.SubmitRequests)]
            for sent in self.sent
        ]
        return [
            [request.id for message in messages for request in message.requests]
            for messages in batches
        ]

    def resumed(self, number: int) -> list[wire.Resumed]:
        """What an engine was asked to resume."""
        messages = self.sent[number]
        resumes = [
            message for message in messages if isinstance(message, wire.ResumeRequests)
        ]
        return [entry for message in resumes for entry in message.resumed]

    def tokens(self) -> list[int]:
        """The tokens that listeners got, of any request."""
        outputs = [message for message in self.heard if isinstance(message, TurnOutputs)]
        rows = [
            row
            for message in outputs
            for row in zip(message.ids, message.tokens, strict=True)
        ]
        return [token for (name, _), token_ids in rows if name for token in token_ids]


def test_a_request_beside_a_suspect_goes_on_elsewhere_and_hears_no_echo() -> None:
    ends = Links(2, routing_policy_named("round_robin"))
    ends.remote.submit([request("a")])
    ends.hear(0, wire.ApiServerOutputs(1.0, ids=(("a", 0),), tokens=((5, 6),)))
    ends.hear(0, wire.ProbingRequest("of another API server"))
    assert ends.sent[0][-1] == wire.CancelRequests(("a",))
    (entry,) = ends.resumed(1)
    assert entry.request.output == (5, 6)
    # The old engine had a step in flight, and then says that it is cancelled.
    ends.hear(0, wire.ApiServerOutputs(2.0, ids=None, tokens=((7,),)))
    ends.hear(0, wire.ApiServerOutputs(2.0, finished=(Finished("a", 0, "cancelled", 3),)))
    name = entry.request.id
    ends.hear(1, wire.ApiServerOutputs(3.0, ids=((name, 0),), tokens=((7,),)))
    assert ends.tokens() == [5, 6, 7]
    ends.hear(1, wire.ApiServerOutputs(3.0, finished=(Finished(name, 0, "stop", 3),)))
    assert not ends.remote.working
    ended = [end for message in ends.heard for end in getattr(message, "finished", ())]
    assert [(end.id, end.reason) for end in ended] == [("a", "stop")]


@pytest.mark.parametrize("n", [1, 2])
def test_what_was_told_to_end_ends_when_it_leaves_its_replica(n: int) -> None:
    ends = Links(2, routing_policy_named("round_robin"))
    ends.remote.submit([request("a", n=n)])
    ends.hear(0, wire.ApiServerOutputs(1.0, ids=(("a", 0),), tokens=((5, 6),)))
    ends.remote.finish([Finish("a", 0, 1, "stop")])
    ends.hear(0, wire.ProbingRequest("of another API server"))
    assert ends.remote.working == (n == 2)
    assert [entry.request.first_sample for entry in ends.resumed(1)] == [*range(1, n)]


# --- deaths -----------------------------------------------------------------------------


def admitted(name: str) -> wire.ApiServerOutputs:
    reason = wire.AdmittedReason(Admitted(name, 0, waited=0.0, hit=0, known=3))
    return wire.ApiServerOutputs(0.0, reasons=(reason,))


def test_requests_of_a_dead_replica_go_on_at_once_and_suspects_in_a_new_engine() -> None:
    ends = Links(3, routing_policy_named("round_robin"))
    ends.remote.submit([request("a"), request("b"), request("c")])
    ends.hear(0, admitted("a"))
    ends.hear(0, wire.ApiServerOutputs(1.0, ids=(("a", 0),), tokens=((5,),)))
    ends.remote.disconnect(0)
    (entry,) = ends.resumed(1)
    assert (entry.request.output, entry.deaths) == ((5,), 1)
    ends.hear(1, admitted(entry.request.id))
    ends.remote.disconnect(1)
    (only_waited,) = ends.resumed(2)
    assert (only_waited.request.id.partition("#")[0], only_waited.deaths) == ("b", 0)
    assert list(ends.remote._requests.unplaced) == ["a"], "the last one must not see it"
    ends.remote.connect(ends.sent[0].append, 0)
    (hello,) = [
        message for message in ends.sent[0] if isinstance(message, wire.ApiServerHello)
    ][1:]
    assert [(entry.request.output, entry.deaths) for entry in hello.resumed] == [
        ((5,), 2)
    ]


def test_what_an_engine_was_serving_does_not_go_to_the_last_one_that_serves() -> None:
    ends = Links(2, routing_policy_named("round_robin"))
    requests = [evolve(request(name), client=name) for name in "abcd"]
    ends.remote.submit(requests)
    ends.hear(0, admitted("a"))
    ends.remote.disconnect(0)
    assert where_of(ends, "a") is None
    assert [where_of(ends, name) for name in "bcd"] == [1, 1, 1], "c only waited"
    ends.link(0)
    assert where_of(ends, "a") is not None


@pytest.mark.parametrize("cause", ["no room", "no start", "no process"])
def test_requests_do_not_wait_for_an_engine_that_does_not_come(cause: str) -> None:
    now = 0.0
    ends = Links(2, routing_policy_named("round_robin"), lambda: now)
    ends.remote.submit([request("a")])
    ends.hear(0, admitted("a"))
    ends.remote.disconnect(0)
    match cause:
        case "no room":
            ends.remote.give_up(0)
        case "no start":
            for _ in range(MAX_FAILED_LOADS):
                assert where_of(ends, "a") is None
                ends.remote.connect(ends.sent[0].append, 0)
                ends.remote.disconnect(0)
        case _:
            now = RESTART_SECONDS - 1
            ends.hear(1, wire.EngineStatus(IDLE))
            assert where_of(ends, "a") is None
            now = RESTART_SECONDS
            ends.hear(1, wire.EngineStatus(IDLE))
    assert where_of(ends, "a") == 1


def test_a_suspect_runs_alone_at_the_first_replica_while_another_one_serves() -> None:
    ends = Links(3, routing_policy_named("round_robin"))
    ends.remote.submit([request("a")])
    for _ in range(SUSPECT_DEATHS):
        name = next(iter(ends.remote._requests.all()[0].names))
        number = where_of(ends, "a")
        assert number is not None
        ends.hear(number, admitted(name))
        ends.remote.disconnect(number)
    assert ends.remote.own_replicas[2].takes_requests
    assert where_of(ends, "a") is None
    ends.link(1)
    assert where_of(ends, "a") is None, "the first one has no link"
    ends.remote.connect(ends.sent[0].append, 0)
    assert where_of(ends, "a") == 0
    ends.hear(0, READY)
    ends.hear(0, wire.ProbingRequest("a#2"))
    other_requests = [request(name) for name in "bcde"]
    ends.remote.submit(other_requests)
    assert {where_of(ends, other_request.id) for other_request in other_requests} == {
        1,
        2,
    }
    ends.remote.disconnect(0)
    ends.remote.disconnect(2)
    ends.link(0)
    assert where_of(ends, "a") == 0, "the second one serves"
    ends.hear(0, wire.ProbingRequest("a#3"))
    ends.hear(0, wire.ProbingRequest())
    ends.remote.submit([request("f"), request("g")])
    assert {where_of(ends, name) for name in "fg"} == {0, 1}
    ends.hear(0, wire.ProbingRequest("of another API server", alone=False))
    assert {where_of(ends, name) for name in "fg"} == {1}
    assert where_of(ends, "a") == 0, "it was not cleared, and waits there"


def test_a_suspect_waits_until_another_replica_serves_the_others() -> None:
    ends = Links(2, routing_policy_named("round_robin"))
    ends.remote.submit([request("a")])
    ends.hear(0, admitted("a"))
    ends.remote.disconnect(0)
    ends.link(0)
    number = where_of(ends, "a")
    assert number is not None
    ends.hear(number, admitted("a#1"))
    ends.remote.disconnect(number)
    other_number = 1 - number
    ends.remote.disconnect(other_number)  # for reasons of its own
    ends.remote.connect(ends.sent[0].append, 0)
    ends.hear(0, READY)
    assert where_of(ends, "a") is None
    ends.link(1)
    assert where_of(ends, "a") == 0


def test_nothing_waits_for_a_replica_that_no_machine_has_room_for() -> None:
    ends = Links(3, routing_policy_named("round_robin"))
    ends.remote.submit([request("a")])
    for _ in range(SUSPECT_DEATHS):
        place = where_of(ends, "a")
        assert place is not None
        name = next(iter(ends.remote._requests.all()[0].names))
        ends.hear(place, admitted(name))
        ends.remote.disconnect(place)
    assert where_of(ends, "a") is None
    lost_numbers = [
        replica.number for replica in ends.remote.replicas if replica.send is None
    ]
    for number in lost_numbers:
        assert where_of(ends, "a") is None, "an engine may come"
        ends.remote.give_up(number)
    assert where_of(ends, "a") not in (None, *lost_numbers)


def where_of(ends: Links, name: str) -> int | None:
    record = ends.remote._requests.get(name)
    assert record is not None
    return record.replica


# --- what the router knows --------------------------------------------------------------


@pytest.mark.parametrize("hostile", [False, True])
def test_routers_know_what_is_cached_where(*, hostile: bool) -> None:
    """After all that was said has arrived: exactly what is in each cache."""
    world = World(3, api_servers=2, replicas=2)
    for _ in range(400):
        world.move(hostile=hostile)
        if not hostile and not _ % 20:
            world.ask(world.api_servers[0], world.any_request())
    settle(world, lambda: quiet(world))
    made_ready(world)
    for replica in world.replicas:
        assert replica.host is not None
        replica.host.tick()
    settle(world, lambda: quiet(world))
    sizes = set[int]()
    for replica in world.replicas:
        assert replica.engine is not None
        cached = set(content_keys(replica.engine.driver.state.blocks.prefix.nodes, 0))
        sizes.add(len(cached))
        for api_server in world.api_servers:
            router = api_server.remote._router
            assert router is not None
            index, slot = router.state.index, router.state.replicas[f"{replica.number}"]
            known_keys = {key for shard in index.shards.values() for key in shard}
            assert {
                key for key in known_keys if holders(index, key) & slot.slot
            } == cached
    assert max(sizes) > 5


def test_what_a_router_decided_replays(tmp_path: Path) -> None:
    world = World(5, api_servers=1, replicas=3)
    (api_server,) = world.api_servers
    router = api_server.remote._router
    assert router is not None
    writer = RoutingJournalFile(tmp_path, router.config, 2**30)
    router._recorder = writer
    for _ in range(300):
        world.move(hostile=True)
    world.kill(0)
    world.run(0)
    writer.close()
    (path,) = tmp_path.iterdir()
    journal = RoutingJournal(path.read_bytes())
    turns = list(journal.turns())
    assert journal.state == router.state
    lost = [reason for turn in turns for reason in getattr(turn.result, "reasons", ())]
    assert any(isinstance(reason, RequestsLost) for reason in lost)
    assert len(turns) > 50


# --- all of them together ---------------------------------------------------------------


def test_the_state_of_several_engines_is_their_sum() -> None:
    ends = Links(2, routing_policy_named("round_robin"))
    totals = evolve(IDLE.totals, counts={"prompt_tokens": 5.0})
    busy = evolve(IDLE, running=2, waiting=3, stalled=9.0, totals=totals)
    for number in range(2):
        ends.hear(number, wire.EngineStatus(busy))
    now = ends.remote.snapshot()
    assert (now.running, now.waiting, now.blocks, now.stalled) == (4, 6, 18, 9.0)
    ends.hear(1, wire.EngineStatus(evolve(busy, stalled=0.0)))
    assert ends.remote.snapshot().stalled == 0.0, "one of them goes on"
    ends.remote.disconnect(1)
    now = ends.remote.snapshot()
    assert (now.running, now.blocks, ends.remote.unready) == (2, 9, "")
    assert [replica.unready for replica in now.replicas] == ["", "waiting for the engine"]
    assert now.totals.counts["prompt_tokens"] == 10.0, "counts never fall"
    ends.link(1)
    ends.hear(1, wire.EngineStatus(IDLE))
    ends.hear(1, wire.EngineStatus(evolve(IDLE, totals=totals)))
    assert ends.remote.snapshot().totals.counts["prompt_tokens"] == 15.0
    ends.remote.reset_cache()
    assert [sent[-1] for sent in ends.sent] == [wire.ResetCache()] * 2

"""Queries of one API server go to all others; and none waits for an API server that has
gone.
"""

from collections.abc import Callable
from random import Random

import pytest

from minfer.effects.cluster.engine_client import request_queries as questions
from minfer.effects.cluster.engine_client.request_queries import RequestQueries
from minfer.effects.cluster.link import link_messages as wire
from minfer.effects.live.totals import NO_TOTALS
from tests.circles import seeds
from tests.effects.cluster.world import World

QUIET = 400  # moves in which what is on its way arrives


def asking(names: dict[int, str], api_servers: int = 3) -> World:
    """API servers that are there, each of which knows of a request."""
    world = World(0, api_servers=api_servers)
    for number, api_server in enumerate(world.api_servers):

        def answer(query: wire.RequestQuery, number: int = number) -> bytes:
            is_known = names.get(number) == query.name
            state = "cancelled" if query.cancel else ""
            return f"{number} {state}".encode() if is_known else b""

        api_server.remote.queries.answer = answer
    settle(world)
    return world


def knowing(number: int) -> Callable[[wire.RequestQuery], bytes]:
    """An API server that knows the request of its number."""
    return lambda requested: b"yes" if requested.name == str(number) else b""


def settle(world: World) -> None:
    """Let everything arrive."""
    for _ in range(QUIET):
        world.move(hostile=False)


def deliver(world: World) -> None:
    """Have all frames arrive that are on their way, and what is said to them."""
    (only,) = world.replicas
    while any(
        link.up or link.down for one in world.api_servers for link in one.links.values()
    ):
        for api_server in world.api_servers:
            world._up(api_server, only)
            world._down(api_server, only)


Answers = list[bytes | None]


def ask(world: World, api_server: int, name: str, *, cancel: bool = False) -> Answers:
    """Ask, and what will have been heard."""
    heard: Answers = []
    world.api_servers[api_server].remote.queries.ask(
        wire.RequestQuery(name, cancel=cancel), heard.append
    )
    return heard


def test_the_front_that_knows_answers() -> None:
    world = asking({2: "a", 1: "b"})
    answers = ask(world, 0, "a"), ask(world, 0, "b", cancel=True), ask(world, 0, "c")
    settle(world)
    assert answers == ([b"2 "], [b"1 cancelled"], [b""])
    assert not world.api_servers[0].remote.queries._pending


def test_without_a_link_or_other_fronts_a_query_has_no_answer() -> None:
    world = World(0, api_servers=1)
    assert ask(world, 0, "a") == [None]
    settle(world)
    heard = ask(world, 0, "a")
    settle(world)
    assert heard == [b""]


def test_an_engine_that_dies_leaves_no_question_open() -> None:
    world = asking({2: "a"})
    heard = ask(world, 0, "a")
    world.kill()
    assert heard == [None]
    assert not world.api_servers[0].remote.queries._pending


def test_where_there_are_several_links_one_that_ends_leaves_others_questions() -> None:
    links: list[list[wire.ToEngine]] = [[], []]
    first, second = (link.append for link in links)
    queries = RequestQueries()
    queries.connect(first)
    queries.connect(second)
    heard: Answers = []
    queries.ask(wire.RequestQuery("a"), heard.append)
    queries.disconnect(second)
    assert (len(links[0]), links[1], heard) == (1, [], [])
    queries.connect(second)
    queries.disconnect(first)
    assert heard == [None]
    queries.ask(wire.RequestQuery("b"), heard.append)
    (asked,) = links[1]
    assert isinstance(asked, wire.SendQuery)
    queries.take_answer(wire.QueryAnswer(asked.number, 1, b"b"))
    assert heard == [None, b"b"]
    queries.answer = lambda query: query.name.encode()
    queries.answer_query(wire.ReceivedQuery(3, 7, 1, wire.RequestQuery("c")), first)
    assert links[0][-1] == wire.SendAnswer(3, wire.QueryAnswer(7, 1, b"c"))


@pytest.mark.long
@seeds(10, 200)
def test_every_question_is_answered_once_whatever_happens(seeds: range) -> None:
    num_known = 0
    for seed in seeds:
        world = World(seed, api_servers=3)
        rng = Random(seed)
        for number, api_server in enumerate(world.api_servers):
            api_server.remote.queries.answer = knowing(number)
        heard: list[tuple[str, Answers]] = []
        for _ in range(60):
            name = str(rng.randrange(4))
            heard.append((name, ask(world, rng.randrange(3), name)))
            for _ in range(10):
                world.move(hostile=True)
        settle(world)
        deliver(world)
        for (
            api_server
        ) in world.api_servers:  # a frame that was lost is noticed by the next one
            api_server.remote.count(NO_TOTALS)
        world._tick(*world.replicas)
        deliver(world)
        # Only of an API server that is gone no answer came, and its asker stops waiting.
        waiting = sum(
            len(api_server.remote.queries._pending) for api_server in world.api_servers
        )
        assert sum(not answers for _, answers in heard) == waiting
        assert all(len(answers) <= 1 for _, answers in heard)
        assert not any(answers[:1] == [b"yes"] for name, answers in heard if name == "3")
        num_known += sum(answers == [b"yes"] for _, answers in heard)
    assert num_known > len(seeds)


def test_more_than_a_front_may_ask_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(questions, "MAX_PENDING", 2)
    emitted: list[wire.ToEngine] = []
    queries = RequestQueries()
    queries.connect(emitted.append)
    heard: Answers = []
    first = queries.ask(wire.RequestQuery("a"), heard.append)
    queries.ask(wire.RequestQuery("b"), heard.append)
    queries.ask(wire.RequestQuery("c"), heard.append)
    assert heard == [None]
    queries.forget(first)
    queries.take_answer(wire.QueryAnswer(first, 1, b"late"))
    assert heard == [None]
    queries.ask(wire.RequestQuery("d"), heard.append)
    requested = [message for message in emitted if isinstance(message, wire.SendQuery)]
    assert [message.query.name for message in requested] == ["a", "b", "d"]
    queries.take_answer(wire.QueryAnswer(requested[1].number, 2))
    assert heard == [None], "one more was asked"
    queries.take_answer(wire.QueryAnswer(requested[1].number, 2))
    assert heard == [None, b""]

"""What one front asks, all others are asked; and nobody waits for who has gone."""

from collections.abc import Callable
from itertools import count
from random import Random

import pytest

from minfer.effects.live.link import messages as wire
from minfer.effects.live.link import questions
from minfer.effects.live.link.questions import Inquirer, Peer, Questions
from minfer.effects.live.totals import NOTHING_COUNTED
from tests.circles import seeds
from tests.effects.live.link.world import World

QUIET = 400  # moves in which what is on its way arrives


class Heard:
    """What a front was sent."""

    def __init__(self) -> None:
        self.said: list[wire.ToFront] = []

    def send(self, data: bytes) -> None:
        self.said.append(wire.read_to_front(data))


def asking(known: dict[int, str], fronts: int = 3) -> World:
    """Fronts that are there, each of which knows of a request."""
    world = World(0, fronts=fronts)
    for number, front in enumerate(world.fronts):

        def answer(wanted: wire.Wanted, number: int = number) -> bytes:
            found = known.get(number) == wanted.name
            what = "cancelled" if wanted.cancel else ""
            return f"{number} {what}".encode() if found else b""

        front.remote.inquirer.answer = answer
    settle(world)
    return world


def knowing(number: int) -> Callable[[wire.Wanted], bytes]:
    """A front that knows the request of its number."""
    return lambda asked: b"yes" if asked.name == str(number) else b""


def settle(world: World) -> None:
    """Let everything arrive."""
    for _ in range(QUIET):
        world.move(hostile=False)


def deliver(world: World) -> None:
    """Have all frames arrive that are on their way, and what is said to them."""
    while any(one.link and (one.link.up or one.link.down) for one in world.fronts):
        for front in world.fronts:
            world._up(front)
            world._down(front)


def ask(world: World, front: int, name: str, *, cancel: bool = False) -> list[bytes]:
    """Ask, and what will have been heard."""
    heard: list[bytes] = []
    world.fronts[front].remote.inquirer.ask(
        wire.Wanted(name, cancel=cancel), heard.append
    )
    return heard


def test_the_front_that_knows_answers() -> None:
    world = asking({2: "a", 1: "b"})
    found = ask(world, 0, "a"), ask(world, 0, "b", cancel=True), ask(world, 0, "c")
    settle(world)
    assert found == ([b"2 "], [b"1 cancelled"], [b""])
    assert world.host is not None
    assert not world.host._questions._open


def test_without_a_link_or_other_fronts_the_answer_comes_at_once() -> None:
    world = World(0, fronts=1)
    assert ask(world, 0, "a") == [b""]
    settle(world)
    heard = ask(world, 0, "a")
    settle(world)
    assert heard == [b""]


def test_who_goes_is_not_waited_for() -> None:
    world = asking({2: "a"})
    heard = ask(world, 0, "nobody's")
    for _ in range(3):
        world._up(world.fronts[0])
    for front in world.fronts[1:]:  # before they could say anything
        world._cut(front)
    for _ in range(9):
        world._down(world.fronts[0])
    assert heard == [b""]


def test_an_engine_that_dies_leaves_no_question_open() -> None:
    world = asking({2: "a"})
    heard = ask(world, 0, "a")
    world.kill()
    assert heard == [b""]
    assert not world.fronts[0].remote.inquirer._asked


@seeds(10, 200)
def test_every_question_is_answered_once_whatever_happens(seeds: range) -> None:
    known = 0
    for seed in seeds:
        world = World(seed, fronts=3)
        rng = Random(seed)
        for number, front in enumerate(world.fronts):
            front.remote.inquirer.answer = knowing(number)
        heard: list[tuple[str, list[bytes]]] = []
        for _ in range(60):
            name = str(rng.randrange(4))
            heard.append((name, ask(world, rng.randrange(3), name)))
            for _ in range(10):
                world.move(hostile=True)
        settle(world)
        deliver(world)
        for front in world.fronts:  # a frame that was lost is noticed by the next one
            front.remote.count(NOTHING_COUNTED)
        world._tick()
        deliver(world)
        assert world.host is None or not world.host._questions._open
        assert all(len(answers) == 1 for _, answers in heard)
        assert not any(answers[0] for name, answers in heard if name == "3")
        known += sum(answers == [b"yes"] for _, answers in heard)
    assert known > len(seeds)


def test_more_than_a_front_may_ask_is_answered_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(questions, "MOST_ASKED", 2)
    said: list[wire.ToEngine] = []
    inquirer = Inquirer()
    inquirer.connect(said.append)
    heard: list[bytes] = []
    first = inquirer.ask(wire.Wanted("a"), heard.append)
    inquirer.ask(wire.Wanted("b"), heard.append)
    inquirer.ask(wire.Wanted("c"), heard.append)
    assert heard == [b""]
    inquirer.forget(first)
    inquirer.told(wire.Told(first, b"late"))
    assert heard == [b""]
    inquirer.ask(wire.Wanted("d"), heard.append)
    asked = [one.wanted.name for one in said if isinstance(one, wire.Ask)]
    assert asked == ["a", "b", "d"]


def test_the_oldest_question_makes_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "MOST_OPEN", 2)
    host, asker, silent, numbers = Questions(), Heard(), Heard(), count()
    peers: list[Peer] = [silent]
    for _ in range(3):
        host.ask(asker, wire.Ask(next(numbers), wire.Wanted("a")), peers)
    assert asker.said == [wire.Told(0)]
    assert len(host._open) == 2
    host.answer(silent, wire.Answer(0, b"late"))
    host.answer(asker, wire.Answer(1, b"not asked"))
    assert len(asker.said) == 1
    host.leave(asker)
    assert not host._open

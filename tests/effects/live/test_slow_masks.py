"""Who needs long for a mask is planned once that is there, and holds nobody up.

The clock stands still but where a matcher costs something, and threads do their jobs when
a test says so: nothing here depends on how fast the machine is.
"""

import threading
from collections import defaultdict
from typing import Any

import pytest
from attrs import define, evolve, field

from minfer.config import EngineConfig
from minfer.effects.live import grammar_masks
from minfer.effects.live.driver import Driver
from minfer.effects.live.grammar_masks import LONG, QUICK, STUCK, GrammarMasks
from minfer.effects.text.grammars.protocol import GrammarError
from minfer.effects.text.grammars.store import Grammars
from minfer.messages import Cancel, Emit, Event, Finished, Ignored, Pause, Submit
from minfer.request import Request
from minfer.runs.oracle import Oracle
from tests.effects.live.walkers import (
    ByHand,
    Clock,
    Compiler,
    Counting,
    ask,
    counted,
)

CONFIG = EngineConfig(
    num_blocks=90,
    block_size=4,
    max_model_len=128,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    vocab_size=32,
    late_masks=True,
)
SLOW = 0.03  # seconds of a mask
PER_MASK = 5  # turns that pass until such a mask is there


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(grammar_masks, "time", made)
    return made


@define
class Engine:
    """A driver whose masks are made by hand."""

    clock: Clock
    config: EngineConfig = CONFIG
    threads: ByHand = field(factory=ByHand)
    compiler: Compiler = field(init=False)
    masks: GrammarMasks = field(init=False)
    driver: Driver = field(init=False)
    tokens: dict[str, list[int]] = field(factory=lambda: defaultdict(list))
    ends: dict[str, Finished] = field(factory=dict)
    reasons: list[Any] = field(factory=list)
    held_up: float = 0.0  # seconds of masks that the driver made itself

    def __attrs_post_init__(self) -> None:
        self.compiler = Compiler(Counting, self.clock)
        self.masks = GrammarMasks(Grammars(lambda: self.compiler), 4)
        self.masks._threads = self.threads  # type: ignore[assignment]  # stands in
        oracle = Oracle(4, self.config.vocab_size)
        self.driver = Driver(self.config, oracle, clock=lambda: 0.0, masks=self.masks)

    def post(self, *events: Event | Request) -> None:
        for event in events:
            made = Submit(event) if isinstance(event, Request) else event
            self.driver.post(made)

    def turn(self, *events: Event | Request, times: int = 1) -> None:
        """Take some."""
        self.post(*events)
        for _ in range(times):
            begun = self.clock.now
            turned = self.driver.turn()
            self.held_up += self.clock.now - begun
            self.reasons += turned.reasons
            for emit in turned.commands:
                if isinstance(emit, Emit):
                    for (name, _), some in zip(emit.ids, emit.tokens, strict=True):
                        self.tokens[name] += some
                    self.ends.update({done.id: done for done in emit.finished})

    def told(self) -> list[Event]:
        """What the engine was told of pauses in the last turn."""
        return [one for one in self.driver.taken if isinstance(one, Pause)]

    @property
    def slow(self) -> set[str]:
        return {name for name, _ in self.masks._slow}

    def lengths(self, *names: str) -> list[int]:
        return [len(self.tokens[name]) for name in names]


def plain(name: str = "p") -> Request:
    return Request(id=name, prompt=(5,), max_tokens=100)


def on(name: str) -> Pause:
    return Pause(name, 0, paused=False)


def quick_ones(clock: Clock, *names: str) -> Engine:
    """Beside one without a constraint, some that run, of none of whom masks are slow."""
    engine = Engine(clock)
    engine.turn(plain(), *map(ask, names))
    engine.threads.run()
    engine.turn(times=4)
    assert not engine.slow
    assert not engine.threads.jobs
    return engine


def test_who_arrives_is_paused_until_its_mask_is_there(clock: Clock) -> None:
    engine = Engine(clock)
    engine.turn(plain(), ask("a"))
    assert engine.told() == [Pause("a", 0)]
    assert len(engine.threads.jobs) == 1
    engine.turn(times=5)
    assert engine.lengths("p", "a") == [5, 0]
    assert not engine.compiler.made  # the matcher too is made by the thread
    engine.threads.run()
    engine.turn()
    assert engine.told() == [on("a")]
    engine.turn(times=5)
    assert engine.tokens["a"] == counted(4)
    assert engine.lengths("p") == [11]


def test_each_sample_of_a_request_is_paused_for_itself(clock: Clock) -> None:
    engine = Engine(clock)
    engine.turn(plain(), ask("a", n=3))
    assert engine.told() == [Pause("a", i) for i in range(3)]
    engine.threads.run(2)
    engine.turn()
    assert engine.told() == [Pause("a", i, paused=False) for i in range(2)]
    assert engine.driver.state.paused == {("a", 2)}


def test_who_was_quick_is_slow_no_more(clock: Clock) -> None:
    engine = Engine(clock)
    engine.compiler.costs = [QUICK, SLOW]
    engine.turn(plain(), ask("a"), ask("b"))
    assert engine.slow == {"a", "b"}
    engine.threads.run()
    assert engine.slow == {"b"}
    before = engine.lengths("a")[0]
    engine.turn(times=6)
    assert engine.lengths("a")[0] >= before + 4  # a token each turn
    assert engine.lengths("b") == [1]  # one, and it is paused again
    assert engine.driver.state.paused == {("b", 0)}


def test_a_slow_one_runs_freely_while_nobody_else_does(clock: Clock) -> None:
    engine = Engine(clock)
    engine.compiler.costs = [SLOW]
    engine.turn(ask("a"))
    engine.threads.run()
    engine.turn(times=6)
    assert engine.lengths("a")[0] >= 4
    assert engine.slow == {"a"}
    assert not engine.threads.jobs
    engine.turn(plain())
    engine.turn(times=4)  # now it has a neighbour
    assert engine.driver.state.paused == {("a", 0)}
    assert len(engine.threads.jobs) == 1
    length = engine.lengths("a")
    engine.turn(times=3)
    assert engine.lengths("a") == length


def test_when_its_neighbours_have_ended_it_runs_freely_again(clock: Clock) -> None:
    engine = Engine(clock)
    engine.compiler.costs = [SLOW]
    engine.turn(plain(), ask("a"))
    engine.threads.run()
    engine.turn(times=4)
    engine.turn(Cancel("p"))
    engine.threads.run()  # the one that it waits for
    engine.turn(times=6)
    assert engine.lengths("a")[0] >= 5
    assert not engine.threads.jobs


def test_all_of_a_step_whose_masks_took_long_are_looked_at_one_by_one(
    clock: Clock,
) -> None:
    engine = quick_ones(clock, "a", "b", "c")
    engine.compiler.made[1].cost = LONG + 0.001
    engine.turn(times=2)
    assert engine.slow == {"a", "b", "c"}
    engine.turn(times=3)
    assert {name for name, _ in engine.driver.state.paused} == {"a", "b", "c"}
    engine.threads.run()
    assert engine.slow == {"b"}
    lengths = engine.lengths("a", "b", "c")
    engine.turn(times=5)
    after = engine.lengths("a", "b", "c")
    grown = [new - old for new, old in zip(after, lengths, strict=True)]
    assert grown[1] == 1
    assert min(grown[0], grown[2]) >= 3


def test_they_are_if_nobody_else_runs(clock: Clock) -> None:
    engine = quick_ones(clock, "a", "b")
    engine.turn(Cancel("p"))
    engine.compiler.made[1].cost = SLOW
    engine.turn(times=5)
    assert engine.driver.state.paused == {("a", 0), ("b", 0)}
    engine.threads.run()
    assert engine.slow == {"b"}


def test_masks_of_a_step_that_took_as_long_as_they_may_make_nobody_slow(
    clock: Clock,
) -> None:
    engine = quick_ones(clock, "a", "b")
    engine.compiler.made[0].cost = LONG / 2
    engine.turn(times=6)
    assert not engine.slow


@pytest.mark.parametrize("error", [GrammarError("no way"), RuntimeError("no way")])
@pytest.mark.parametrize("late", [False, True])
def test_a_matcher_that_cannot_be_made_ends_its_sample_alone(
    clock: Clock, error: Exception, late: bool
) -> None:
    engine = Engine(clock)
    engine.turn(plain(), ask("a"), ask("b"))
    if late:
        engine.masks.forget([("a", 0)])  # it needs another one
        engine.threads.run()
        engine.masks.forget([("a", 0)])
    engine.compiler.error = error
    engine.threads.run()
    engine.turn(times=5)
    ended = engine.ends["a"]
    assert (ended.reason, ended.length) == ("error", 0)
    assert ended.error == f"{STUCK}: no way"
    assert engine.tokens["b"] == counted(len(engine.tokens["b"]))
    assert min(engine.lengths("b", "p")) >= 3
    assert len(engine.masks) == 1


def test_a_matcher_that_breaks_in_a_thread_ends_its_sample_alone(clock: Clock) -> None:
    engine = Engine(clock)
    engine.compiler.costs = [SLOW]
    engine.turn(plain(), ask("a"))
    engine.threads.run()
    engine.turn(times=4)
    (walker,) = engine.compiler.made
    walker.broken = True
    engine.threads.run()
    engine.turn(times=4)
    assert engine.ends["a"].error == f"{STUCK}: too much work"
    assert engine.tokens["a"] == counted(1)
    assert set(engine.ends) == {"a"}


def test_who_is_resumed_goes_on_where_its_output_ended(clock: Clock) -> None:
    engine = Engine(clock)
    engine.turn(plain(), ask("a", output=tuple(counted(3))))
    engine.threads.run()
    (walker,) = engine.compiler.made
    assert walker.taken == counted(3)
    engine.turn(times=6)
    assert engine.tokens["a"] == counted(9)[3 : 3 + engine.lengths("a")[0]]
    assert engine.lengths("a")[0] >= 3
    assert len(engine.compiler.made) == 1


# --- who leaves while a thread is at it -------------------------------------------------


def test_what_is_made_for_somebody_who_has_left_is_nobodys(clock: Clock) -> None:
    engine = Engine(clock)
    engine.turn(plain(), ask("a"))
    engine.turn(Cancel("a"))
    assert not len(engine.masks)
    engine.threads.run()
    engine.turn(times=2)
    ignored = [one for one in engine.reasons if isinstance(one, Ignored)]
    assert [one.event for one in ignored] == ["pause"]
    assert not engine.slow
    assert engine.lengths("p") == [3]


def test_a_mask_of_a_request_that_has_ended_lets_none_of_its_name_go_on(
    clock: Clock,
) -> None:
    engine = Engine(clock)
    engine.turn(plain(), ask("a"))
    engine.turn(Cancel("a"))
    engine.turn(ask("a"))
    assert len(engine.threads.jobs) == 2
    engine.threads.run(1)  # the old one's
    engine.turn()
    assert not engine.told()
    assert engine.slow == {"a"}
    engine.threads.run()
    engine.turn()
    assert engine.told() == [on("a")]
    engine.turn(times=4)
    assert engine.tokens["a"] == counted(3)


def test_a_matcher_is_for_one_thread_at_a_time(clock: Clock) -> None:
    engine = Engine(clock)
    go, calls = threading.Event(), list[str]()

    class Waiting(Counting):
        def bits(self) -> bytes:
            calls.append("begins")
            assert go.wait(5)
            calls.append("ends")
            return super().bits()

    engine.compiler.kind = Waiting
    engine.turn(plain(), ask("a"))
    thread = threading.Thread(target=engine.threads.run)
    thread.start()
    while not calls:
        pass
    threading.Timer(0.02, go.set).start()
    engine.turn(on("a"))  # although it is not there yet
    engine.turn()
    assert calls[:2] == ["begins", "ends"]
    thread.join()
    engine.turn(times=3)
    assert engine.tokens["a"] == counted(engine.lengths("a")[0])
    assert calls == ["begins", "ends"] * (len(calls) // 2)


def test_whoever_is_being_made_something_may_be_closed(clock: Clock) -> None:
    engine = Engine(clock)
    engine.turn(plain(), ask("a"), ask("b"))
    begun = []

    class Closing(Counting):
        def bits(self) -> bytes:
            begun.append(self)
            engine.driver.close()
            return super().bits()

    engine.compiler.kind = Closing
    engine.threads.run()
    assert len(begun) == 1  # the other one's was cancelled
    assert not len(engine.masks)
    assert not engine.slow


# --- what the neighbours notice ---------------------------------------------------------


def pace(engine: Engine, *wanted: Request) -> list[float]:
    """How many turns a token of each takes, once all have begun. Threads make masks
    within a turn, but for the request "slow", where that takes `PER_MASK`.
    """
    names = [one.id for one in wanted]
    before = list[int]()
    engine.post(*wanted)
    for _ in range(7):
        for _ in range(PER_MASK):
            engine.turn()
            engine.threads.run(but="slow")
        engine.threads.run()
        before = before or engine.lengths(*names)
    after = engine.lengths(*names)
    for name, length in zip(names, after, strict=True):
        assert name == "p" or engine.tokens[name] == counted(length)
    return [6 * PER_MASK / (b - a) for a, b in zip(before, after, strict=True)]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("late_masks", [False, True])
def test_neighbours_of_a_slow_one_keep_their_pace(
    clock: Clock, depth: int, late_masks: bool
) -> None:
    config = evolve(CONFIG, depth=depth, late_masks=late_masks)
    neighbours = plain(), ask("q", max_tokens=60)
    alone = pace(Engine(clock, config), *neighbours)
    engine = Engine(clock, config)
    engine.compiler.costs = [0.0, SLOW]
    beside = pace(engine, *neighbours, ask("slow"))
    assert beside[:2] == pytest.approx(alone, rel=0.1)
    assert beside[0] == 1
    assert beside[2] == pytest.approx(PER_MASK, rel=0.2)
    assert engine.held_up == 0.0


@pytest.mark.parametrize(("depth", "late_masks"), [(1, True), (2, False), (2, True)])
def test_so_do_those_who_all_have_constraints(
    clock: Clock, depth: int, late_masks: bool
) -> None:
    engine = Engine(clock, evolve(CONFIG, depth=depth, late_masks=late_masks))
    engine.compiler.costs = [0.0, 0.0, SLOW]
    turns = pace(engine, ask("q", max_tokens=60), ask("r", max_tokens=60), ask("slow"))
    assert turns == [1, 1, PER_MASK]
    assert engine.held_up == 0.0

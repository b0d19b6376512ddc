"""What listeners are told, of turns that the engine decides, and of its death."""

import threading

from attrs import evolve

from minfer.analysis.drafts import StepDrafts
from minfer.effects.live.client import EngineDied, EngineMessage, TurnOutputs
from minfer.effects.live.engine.reporting import OutputReporter
from minfer.engine import step
from minfer.records.config import EngineConfig
from minfer.records.messages import Admitted, Event, Execute, QueueBlocked, Submit, Tick
from minfer.records.request import Request
from minfer.records.state import Transition, initial
from minfer.simulation.oracle import Oracle

CONFIG = EngineConfig(num_blocks=20, block_size=4, max_num_seqs=1, vocab_size=100)
MORE = 1.0  # seconds from turn to turn


class World:
    """Turns of an engine, of which a `OutputReporter` is told as the worker tells it."""

    def __init__(self, *, early: bool = False, other: bool = False) -> None:
        self.reporter = OutputReporter(CONFIG, threading.Condition())
        self.heard: list[EngineMessage] = []
        self.reporter.listen(self.heard.append, early=early)
        if other:
            self.reporter.listen(lambda _: None)
        self.state, self.oracle, self.time = initial(CONFIG), Oracle(4, 100), 0.0

    def turn(self, *news: Event, drafts: tuple[StepDrafts, ...] = ()) -> Transition:
        """Take a turn; afterwards `heard` has what it told, in its order."""
        self.time += MORE
        executed = (self.oracle.collect(),) if self.oracle.plans else ()
        events = (Tick(self.time), *executed, *news)
        before, moved = self.state, step(CONFIG, self.state, events)
        self.reporter.report_admissions(before, events, moved)
        self.before_step = len(self.heard)
        for command in moved.commands:
            if isinstance(command, Execute):
                self.oracle.launch(command.plan)
        self.state = moved.state
        if (outputs := self.reporter.outputs_of(events, moved, drafts)) is not None:
            self.reporter.send(outputs)
        return moved

    def news(self) -> list[TurnOutputs]:
        """What was heard since this was asked last."""
        outputs = [message for message in self.heard if isinstance(message, TurnOutputs)]
        self.heard.clear()
        return outputs


def ask(name: str, tokens: int = 2) -> Submit:
    return Submit(Request(id=name, prompt=(1, 2, 3), max_tokens=tokens))


def test_a_turn_is_one_message_with_all_that_it_brought() -> None:
    world = World()
    world.turn(ask("a", 1))
    (first,) = world.news()
    assert first.arrived == ("a",)
    assert [type(reason) for reason in first.reasons] == [Admitted]
    assert first.time == MORE
    world.turn(ask("b"))
    (second,) = world.news()
    assert (second.ids, len(second.tokens[0])) == ((("a", 0),), 1)
    assert [end.id for end in second.finished] == ["a"]
    assert second.arrived == ("b",)
    assert [type(reason) for reason in second.reasons] == [Admitted]  # the end comes once


def test_a_turn_without_outputs_reports_nothing() -> None:
    world = World()
    world.turn()
    assert not world.heard


def test_drafts_are_reported_beside_the_tokens() -> None:
    world = World()
    world.turn(ask("a"))
    world.news()
    world.turn(drafts=(StepDrafts(0, (("a", 0),), (3,), (4,), (1,)),))
    assert world.news()[0].drafts == (4,)


def test_admissions_are_reported_before_the_step_to_clients_that_want_them() -> None:
    usual, early = World(), World(early=True, other=True)
    for world in (usual, early):
        world.turn(ask("a", 1))
    assert (usual.before_step, early.before_step) == (0, 1)
    (late,), (first,) = usual.news(), early.news()
    assert first == late, "the same, and nothing is left to tell"
    usual.turn(ask("b"))
    early.turn(ask("b"))
    (single,), (start, results) = usual.news(), early.news()
    assert (start.arrived, start.reasons) == (single.arrived, single.reasons)
    assert (start.ids, start.finished) == ((), ())
    assert results == evolve(single, arrived=(), reasons=())


def test_what_does_not_start_is_reported_afterwards() -> None:
    world = World(early=True)
    world.turn(ask("a", 9))
    world.news()
    world.turn(ask("b"))
    assert world.before_step == 0
    (message,) = world.news()
    assert message.arrived == ("b",)
    assert QueueBlocked in map(type, message.reasons)


def test_seconds_are_counted_by_what_the_next_in_line_waited_for() -> None:
    world = World()
    world.turn(ask("a", 3), ask("b", 1))
    assert world.news()[-1].waits == {}
    world.turn()
    first = world.news()[-1].waits
    world.turn()
    assert first == {"rows": MORE}, "what was told does not change"
    assert world.news()[-1].waits == {"rows": 2 * MORE}


def test_a_death_is_reported_once_and_when_the_lock_is_free() -> None:
    lock, heard = threading.Condition(), list[tuple[EngineMessage, bool]]()

    def other_could(results: list[bool]) -> None:
        if free := lock.acquire(timeout=0.05):
            lock.release()
        results.append(free)

    def hear(message: EngineMessage) -> None:
        results = list[bool]()
        thread = threading.Thread(target=other_could, args=(results,))
        thread.start()
        thread.join()
        heard.append((message, results[0]))

    reporter = OutputReporter(CONFIG, lock)
    reporter.listen(hear)
    with reporter.locked():
        with reporter.locked():
            reporter.note_death(("a", "b"), "it broke")
        assert not heard, "who called this one still holds it"
    assert heard == [(EngineDied(("a", "b"), "it broke"), True)]
    reporter.report_death()
    with reporter.locked():
        pass
    assert len(heard) == 1


def test_a_death_noted_under_the_lock_is_reported_by_a_message() -> None:
    lock, heard = threading.Condition(), list[EngineMessage]()
    reporter = OutputReporter(CONFIG, lock)
    reporter.listen(heard.append)
    with lock:
        reporter.note_death((), "it broke")
    assert not heard
    reporter.report_death()
    assert heard == [EngineDied((), "it broke")]

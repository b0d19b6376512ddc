"""The table of a server's processes: whatever happens to them, it comes to its end."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minfer.effects.cluster.processes.process_ends import (
    ENGINE,
    FAILED_EXIT_CODE,
    FIRST_PAUSE_SECONDS,
    INTERRUPTED_EXIT_CODE,
    MAX_FAILED_STARTS,
    MAX_PAUSE_SECONDS,
    Action,
    Processes,
    Signal,
    Start,
    api_server_name,
    engine_names,
)

ONE, TWO = api_server_name(0), api_server_name(1)


def begun(api_servers: int = 2) -> Processes:
    """All processes run; none has said that it is ready."""
    processes = Processes(api_servers)
    for action in processes.begin():
        processes.note_started(action.name)
    return processes


def served(api_servers: int = 2) -> Processes:
    processes = begun(api_servers)
    emitted = [processes.note_ready(name) for name in sorted(processes.alive)]
    assert emitted == [False] * api_servers + [True]
    return processes


def test_torchrun_starts_all_again_when_an_engine_ends() -> None:
    processes = Processes(1, by_torchrun=True)
    for action in processes.begin():
        processes.note_started(action.name)
        processes.note_ready(action.name)
    assert processes.note_ended(ENGINE, 137) == [Signal(ONE, "stop")]
    assert processes.note_ended(ONE, 0) == []
    assert processes.over
    assert processes.code == 137


def test_all_are_started_and_ready_is_reported_once() -> None:
    processes = Processes(2)
    assert processes.begin() == [Start(ENGINE), Start(ONE), Start(TWO)]
    processes = served()
    assert not processes.note_ready(ENGINE)
    processes.note_ended(ENGINE, 137)
    processes.note_started(ENGINE)
    assert not processes.note_ready(ENGINE)


@pytest.mark.parametrize("name", [ENGINE, ONE])
def test_a_ready_process_that_ended_is_restarted_at_once(name: str) -> None:
    processes = served()
    for _ in range(3 * MAX_FAILED_STARTS):
        assert processes.note_ended(name, 137) == [Start(name, FIRST_PAUSE_SECONDS)]
        processes.note_started(name)
        processes.note_ready(name)
    assert processes.phase == "watching"


def test_a_process_that_is_never_ready_is_given_up() -> None:
    processes = served()
    processes.note_ended(ENGINE, 137)
    for count in range(1, MAX_FAILED_STARTS):
        processes.note_started(ENGINE)
        assert processes.note_ended(ENGINE, 1) == [
            Start(ENGINE, FIRST_PAUSE_SECONDS * 2**count)
        ]
    processes.note_started(ENGINE)
    assert processes.note_ended(ENGINE, 0) == [Signal(ONE, "stop"), Signal(TWO, "stop")]
    assert processes.code == FAILED_EXIT_CODE
    assert processes.note_ended(ONE, 0) == []
    assert not processes.over
    assert (
        processes.note_ended(TWO, 0) == []
    )  # there is no engine any more that could be told
    assert processes.over


def test_one_that_becomes_ready_between_has_not_failed_in_a_row() -> None:
    processes = served()
    for _ in range(3):
        processes.note_ended(ENGINE, 1)
        for _ in range(MAX_FAILED_STARTS - 1):
            processes.note_started(ENGINE)
            processes.note_ended(ENGINE, 1)
        processes.note_started(ENGINE)
        processes.note_ready(ENGINE)
    assert processes.phase == "watching"


@pytest.mark.parametrize(
    ("code", "reported"), [(2, 2), (137, 137), (0, FAILED_EXIT_CODE)]
)
@pytest.mark.parametrize("name", [ENGINE, ONE])
def test_a_server_that_cannot_begin_ends_with_the_failed_processs_code(
    name: str, code: int, reported: int
) -> None:
    processes = begun()
    processes.note_ended(name, code)
    for process in (ONE, TWO, ENGINE):
        processes.note_ended(process, 0)
    assert (processes.over, processes.code) == (True, reported)


def test_a_word_of_one_that_has_ended_is_not_its_successors() -> None:
    processes = begun()
    processes.note_ended(ENGINE, 1)
    assert not processes.note_ready(ENGINE)
    assert ENGINE not in processes.ready


def test_a_signal_drains_fronts_first_and_the_engine_goes_last() -> None:
    processes = served()
    drain = processes.note_signal(interrupt=False)
    assert drain == [Signal(ONE, "drain"), Signal(TWO, "drain")]
    assert processes.note_ended(ONE, 0) == []
    assert processes.note_ended(TWO, 0) == [Signal(ENGINE, "stop")]
    assert not processes.over
    assert processes.note_ended(ENGINE, 0) == []
    assert (processes.over, processes.code) == (True, 0)


def test_a_second_signal_does_not_wait() -> None:
    processes = served()
    processes.note_signal(interrupt=False)
    stop = processes.note_signal(interrupt=False)
    assert stop == [Signal(ONE, "stop"), Signal(TWO, "stop")]
    assert (processes.phase, processes.code) == ("stopping", 0)


def test_an_interrupt_does_not_wait_and_has_its_code() -> None:
    processes = served()
    assert processes.note_signal(interrupt=True) == [
        Signal(ONE, "stop"),
        Signal(TWO, "stop"),
    ]
    for name in (ONE, TWO, ENGINE):
        processes.note_ended(name, 137)
    assert (processes.over, processes.code) == (True, INTERRUPTED_EXIT_CODE)


def test_while_fronts_drain_their_engine_is_started_again() -> None:
    processes = served()
    processes.note_signal(interrupt=False)
    assert processes.note_ended(ENGINE, 137) == [Start(ENGINE, FIRST_PAUSE_SECONDS)]
    assert processes.may_start(ENGINE)
    processes.note_started(ENGINE)
    assert processes.note_ended(ONE, 137) == []  # nothing new is begun
    assert not processes.may_start(ONE)
    processes.note_ended(TWO, 0)
    assert not processes.may_start(ENGINE)


def test_an_engine_that_cannot_be_kept_up_is_given_up_while_fronts_drain() -> None:
    processes = served()
    processes.note_signal(interrupt=False)
    for _ in range(MAX_FAILED_STARTS):
        processes.note_ended(ENGINE, 1)
        processes.note_started(ENGINE)
    assert processes.note_ended(ENGINE, 1) == [Signal(ONE, "stop"), Signal(TWO, "stop")]


def test_a_process_that_ignores_signals_is_killed() -> None:
    processes = served()
    processes.note_signal(interrupt=False)
    killed = processes.note_timeout()
    assert killed == [Signal(name, "kill") for name in (ONE, TWO, ENGINE)]
    assert processes.phase == "stopping"


def test_a_hanging_process_is_killed_unless_it_is_stopping() -> None:
    processes = served()
    assert processes.note_hang(ENGINE) == [Signal(ENGINE, "kill")]
    assert processes.note_ended(ENGINE, 137) == [Start(ENGINE, FIRST_PAUSE_SECONDS)]
    processes.note_started(ENGINE)
    processes.note_signal(interrupt=False)
    assert processes.note_hang(ENGINE) == [Signal(ENGINE, "kill")], (
        "API servers wait for it"
    )
    processes.note_signal(interrupt=False)
    assert processes.note_hang(ENGINE) == []


def test_of_several_engines_one_that_fails_does_not_end_the_others() -> None:
    first, second = engine_names(2)
    processes = Processes(1, replicas=2)
    assert processes.begin() == [Start(first), Start(second), Start(ONE)]
    for name in (first, second, ONE):
        processes.note_started(name)
    assert [processes.note_ready(name) for name in (first, second, ONE)] == [
        False,
        False,
        True,
    ]
    processes.note_ended(first, 137)
    for _ in range(2000):  # a day, and more than a float can be doubled
        processes.note_started(first)
        (start,) = processes.note_ended(first, 1)
        assert isinstance(start, Start)
    assert start == Start(first, MAX_PAUSE_SECONDS)
    processes.note_ended(second, 137)
    processes.note_started(first)
    assert processes.note_ended(first, 1) == [Signal(ONE, "stop")], "none is left"


def test_several_engines_are_stopped_once_the_last_front_has_ended() -> None:
    first, second = engine_names(2)
    processes = Processes(1, replicas=2)
    for name in (first, second, ONE):
        processes.note_started(name)
        processes.note_ready(name)
    assert processes.note_signal(interrupt=False) == [Signal(ONE, "drain")]
    assert processes.note_ended(second, 137) == [Start(second, FIRST_PAUSE_SECONDS)]
    processes.note_started(second)
    assert processes.note_ended(ONE, 0) == [Signal(first, "stop"), Signal(second, "stop")]


EVENTS = st.one_of(
    st.tuples(st.just("end"), st.integers(0, 3), st.sampled_from([0, 1, 2, 137])),
    st.tuples(st.just("ready"), st.integers(0, 3)),
    st.tuples(st.just("start"), st.integers(0, 3)),
    st.tuples(st.just("hang"), st.integers(0, 3)),
    st.tuples(st.just("signal"), st.booleans()),
    st.just(("time",)),
)


class Watched:
    """A table whose every answer is judged."""

    def __init__(self, api_servers: int) -> None:
        self.table = Processes(api_servers)
        self.names = [ENGINE, *map(api_server_name, range(api_servers))]
        self.due = {action.name for action in self.table.begin()}
        self.ready = 0  # times that it was said

    def check(self, actions: list[Action]) -> None:
        for action in actions:
            assert action.name in self.names
            if isinstance(action, Start):
                assert action.name not in self.table.alive
                assert self.table.may_start(action.name)
                self.due.add(action.name)
            else:
                assert action.name in self.table.alive, "there is no process to notify"

    def start(self, name: str) -> None:
        self.due.discard(name)
        if self.table.may_start(name):
            assert not self.table.over
            self.table.note_started(name)

    def happen(self, event: str, *arguments: Any) -> None:
        table = self.table
        name = self.names[arguments[0] % len(self.names)] if arguments else ""
        match event:
            case "end" if name in table.alive:
                self.check(table.note_ended(name, arguments[1]))
            case "hang" if name in table.alive:
                self.check(table.note_hang(name))
            case "ready":
                self.ready += table.note_ready(name)
            case "start" if name in self.due:
                self.start(name)
            case "signal" if not table.over:
                self.check(table.note_signal(interrupt=arguments[0]))
                assert table.phase != "watching"
            case "time" if table.phase != "watching":
                self.check(table.note_timeout())


PHASES = ("watching", "draining", "stopping")


@given(st.integers(1, 3), st.lists(EVENTS, max_size=40), st.booleans())
def test_whatever_happens_it_ends(
    api_servers: int, events: list[tuple[Any, ...]], interrupt: bool
) -> None:
    watched = Watched(api_servers)
    table = watched.table
    for event in events:
        phase = table.phase
        watched.happen(*event)
        assert PHASES.index(table.phase) >= PHASES.index(phase), "there is no way back"
    assert watched.ready <= 1
    watched.check(table.note_signal(interrupt=interrupt))
    watched.check(table.note_timeout())
    for name in list(watched.due):
        watched.start(name)
    for name in sorted(table.alive):
        watched.check(table.note_ended(name, 137))
    assert table.over
    assert not interrupt or table.code == INTERRUPTED_EXIT_CODE

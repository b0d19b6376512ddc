"""Several processes: one line, one beginning, one report."""

import _thread
import os
import signal
import threading
from collections import Counter

import pytest

from minfer.effects.runs.load import processes
from minfer.effects.runs.load.client import Counts
from minfer.effects.runs.load.processes import default_processes, put, share
from minfer.effects.runs.load.prompts import RandomPrompts, Tokens
from minfer.effects.runs.load.record import INTERRUPTED, LoadError
from tests.effects.runs.load.stub import NEVER, WHOLE, load_on, stream, stub, token


def test_shares_are_as_equal_as_can_be() -> None:
    assert [share(10, 4, place) for place in range(4)] == [3, 3, 2, 2]
    assert [share(1, 2, place) for place in range(2)] == [1, 0]


def test_processes_are_no_more_than_cores_or_requests_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for cores, lanes, wanted in ((4, None, 4), (4, 2, 2), (64, None, 8), (1, 9, 1)):
        monkeypatch.setattr(
            os, "sched_getaffinity", lambda _, n=cores: set(range(n)), raising=False
        )
        assert default_processes(lanes) == wanted


def test_two_processes_share_a_line_and_the_lanes() -> None:
    shown: list[Counts] = []
    with stub(stream(0.02, *WHOLE)) as server:
        load = load_on(server.url, 60, max_concurrency=3)
        outcome = put(load, 2, shown.append)
        assert server.connections == 3
    assert [one.number for one in outcome.records] == [*range(60)]
    assert all(one.good for one in outcome.records)
    assert len(outcome.cpu) == 2
    assert 0 < max(outcome.cpu) < 2
    assert outcome.seconds == max(one.ended for one in outcome.records)
    assert not outcome.stopped
    assert shown[-1] == Counts(sent=60, ended=60, failed=0, events=240)


def test_an_interrupt_reports_what_there_was() -> None:
    with stub(stream(*WHOLE), stream(token("a"), NEVER)) as server:
        timers: list[threading.Timer] = []

        def interrupt(counts: Counts) -> None:
            if counts.ended and not timers:
                timers.append(threading.Timer(0.05, _thread.interrupt_main))
                timers[0].start()

        outcome = put(load_on(server.url, 100, max_concurrency=2), 2, interrupt)
        timers[0].join()
    assert outcome.stopped
    kinds = Counter(one.failure and one.failure.kind for one in outcome.records)
    assert kinds[None] == 1
    assert set(kinds) == {None, INTERRUPTED}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class Deadly(RandomPrompts):
    """Prompts that kill whoever asks for one."""

    def ask(self, number: int) -> object:  # type: ignore[override]  # it returns nothing
        os._exit(7 + 0 * number)


def test_processes_that_die_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_STOP", 1.0)
    with stub() as server:
        load = load_on(server.url, 5, prompts=Deadly(Tokens(), 4, 4))
        with pytest.raises(LoadError, match=r"process 0 died \(exit code 7\)"):
            put(load, 1)

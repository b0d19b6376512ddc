"""Jobs in line, and a program that ends before their turn."""

import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, Future, wait
from typing import Any

import pytest

from minfer.effects.text.grammars.job_threads import JobThreads
from tests.effects.waiting import until

SECONDS = 0.2  # of a job


def test_as_many_at_once_as_there_are_threads_and_in_order() -> None:
    threads, gate = JobThreads(2, "test"), threading.Event()
    started = list[int]()

    def work(number: int) -> int:
        started.append(number)
        assert gate.wait(5)
        return number * number

    jobs: list[Future[int]] = [threads.submit(work, number) for number in range(6)]
    until(lambda: len(started) == 2)
    assert sorted(started) == [0, 1]
    assert jobs[3].cancel()
    gate.set()
    wait(jobs, 5)
    assert [job.result() for job in jobs if not job.cancelled()] == [0, 1, 4, 16, 25]
    assert 3 not in started
    threads.close()


def test_what_fails_is_reported_and_the_next_comes() -> None:
    threads = JobThreads(1, "test")

    def fail() -> None:
        raise ZeroDivisionError

    jobs: list[Future[Any]] = [threads.submit(fail), threads.submit(int)]
    with pytest.raises(ZeroDivisionError):
        jobs[0].result(5)
    assert jobs[1].result(5) == 0
    threads.close()


def test_who_closes_cancels_what_has_not_begun() -> None:
    threads, gate = JobThreads(1, "test"), threading.Event()
    jobs: list[Future[bool]] = [threads.submit(gate.wait, 5) for _ in range(3)]
    until(jobs[0].running)
    threads.close()
    last: Future[Any] = threads.submit(int)
    assert not jobs[0].done()  # who has begun is not waited for
    assert not wait((*jobs[1:], last), 1).not_done
    for job in (*jobs[1:], last):
        with pytest.raises(CancelledError):
            job.result(0)
    gate.set()
    assert jobs[0].result(5)


def ends(program: str) -> tuple[float, str]:
    """Seconds from a program's last line to its end, and what it said till then."""
    finished = subprocess.run(
        [sys.executable, "-c", f"{program}\nprint(time.time())"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    *emitted, last = finished.stdout.splitlines()
    return time.time() - float(last), "\n".join(emitted)


@pytest.mark.long
def test_a_program_that_ends_waits_only_for_what_has_begun() -> None:
    took, _ = ends(
        "import time\n"
        "from minfer.effects.text.grammars.job_threads import JobThreads\n"
        "threads = JobThreads(2, 'test')\n"
        f"jobs = [threads.submit(time.sleep, {SECONDS}) for _ in range(40)]"
    )
    assert took < 10 * SECONDS, "all of them take twice as long"


@pytest.mark.long
def test_a_waiter_whose_turn_never_comes_is_cancelled() -> None:
    """A thread of one's own could not end, else, nor the program."""
    took, _ = ends(
        "import threading, time\n"
        "from concurrent.futures import CancelledError\n"
        "from minfer.effects.text.grammars.store import Grammars\n"
        "from minfer.sampling.structured import StructuredOutputs\n"
        "class Slow:\n"
        "    def compile(self, asked):\n"
        f"        time.sleep({SECONDS})\n"
        "grammars = Grammars(Slow)\n"
        "asked = [StructuredOutputs(regex='a' * n) for n in range(1, 40)]\n"
        "begun = [grammars.begin(one) for one in asked]\n"
        "threading.Thread(target=begun[-1].exception).start()"
    )
    assert took < 10 * SECONDS


def test_the_kind_of_future_is_one_that_others_can_wait_for() -> None:
    future = JobThreads(1, "test").submit(int)
    assert isinstance(future, Future)
    assert wait([future], 5).done == {future}

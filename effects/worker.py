"""A driver in a thread of its own, which lives only while there is work.

Why a thread: an interrupt (Ctrl-C) reaches the main thread between any two bytecodes, and a turn
cut in half would leave the executor and the engine's state disagreeing. So the main thread waits,
where it can be interrupted safely, and turns are never cut. The thread starts with the first
request and ends with the last one: nothing is left to clean up, and no signal handler is needed.
"""

import gc
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

from minfer.effects.assembly import Assembly
from minfer.effects.driver import Driver, QuietCollector
from minfer.effects.edge import RequestError
from minfer.messages import Admitted, Cancel, Emit, Submit, clip
from minfer.state import Transition

QUIET_AFTER: Final = 1.0  # seconds of work after which the collector is silenced: it costs 0.1 s
SWEEP_EVERY: Final = 60.0  # seconds; a server that is never idle leaves cycles behind too


class EngineDeadError(RuntimeError):
    """The engine is closed, or broke; it serves nobody any more."""


class Worker:
    """Serves requests through a driver. Every method may be called from any thread.

    `observers` are called with each turn's transition once its outputs are out, and `on_end` with
    each request that the engine has ended; both in the engine's thread, which stands still
    meanwhile and breaks if they raise.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.jobs: dict[str, Assembly] = {}
        self.news = threading.Condition()  # guards all below; notified when events are posted
        self.thread: threading.Thread | None = None  # the last one that was started
        self.running = False
        self.dead: BaseException | None = None
        self.closed = False
        self.observers: list[Callable[[Transition], None]] = []
        self.on_end: list[Callable[[Assembly], None]] = []

    def submit(self, jobs: Iterable[Assembly]) -> None:
        """Serve requests: all of them enter the same turn, or none.

        Raises EngineDeadError, and RequestError if a request with such an id is being served.
        """
        jobs = list(jobs)
        with self.news:
            for job in jobs:
                self.check(job)
            now = self.driver.clock()
            for job in jobs:
                job.arrived = now
                self.jobs[job.request.id] = job
                self.driver.post(Submit(job.request))
            self._wake()

    def check(self, job: Assembly) -> None:
        """Raise what `submit` would raise now."""
        if self.dead is not None:
            raise EngineDeadError(f"the engine serves nobody any more: {self.dead}") from self.dead
        if job.request.id in self.jobs:
            name = clip(job.request.id)
            raise RequestError(f"a request with the id {name!r} is being served; ids must differ")

    def cancel(self, ids: Iterable[str]) -> None:
        """End requests; their outputs come as they are, with the finish reason "cancelled"."""
        with self.news:
            for name in ids:
                if name in self.jobs:
                    self.driver.post(Cancel(name))
            if self.driver.busy:
                self._wake()

    def drop(self, jobs: Iterable[Assembly]) -> None:
        """Cancel requests and wait until they are gone: nobody wants their outputs."""
        # One that was refused for its id must not take the other one of that id with it.
        names = [job.request.id for job in jobs if self.jobs.get(job.request.id) is job]
        self.cancel(names)
        with self.news:
            while any(name in self.jobs for name in names) and self.running:
                self.news.wait(0.02)

    def close(self) -> None:
        """Cancel everything, let the thread end, and let go of the executor. Idempotent."""
        with self.news:
            self.dead = self.dead or _ClosedError("it was closed")  # so that nobody comes in yet
            thread = self.thread
        self.cancel(list(self.jobs))
        if thread is not None:
            thread.join()
        with self.news:
            first, self.closed = not self.closed, True
        if first:
            self.driver.close()

    def _wake(self) -> None:
        """Start the thread if it does not run; the caller holds the lock."""
        alive = self.running and self.thread is not None and self.thread.is_alive()
        # At the interpreter's end a new thread would never come to run.
        if not alive and self.dead is None and threading.main_thread().is_alive():
            self.running = True
            self.thread = threading.Thread(target=self._run, name="minfer-engine")
            self.thread.start()
        self.news.notify_all()

    def _run(self) -> None:
        quiet, since = None, time.monotonic()
        try:
            while self._has_work():
                passed = time.monotonic() - since
                if quiet is None and passed > QUIET_AFTER:
                    quiet = QuietCollector()
                    quiet.__enter__()
                elif quiet is not None and passed > SWEEP_EVERY:
                    gc.collect()
                    since = time.monotonic()
                transition = self.driver.turn()
                self._deliver(transition)
                for observe in self.observers:
                    observe(transition)
        except BaseException as error:  # whoever waits must hear of it, whatever it is
            self._die(error)
        finally:
            if quiet is not None:
                quiet.__exit__()

    def _has_work(self) -> bool:
        """Wait until a turn is due; False ends the thread."""
        driver = self.driver
        with self.news:
            while driver.busy and threading.main_thread().is_alive():
                if driver.state.inflight or driver.inbox or driver.wake is None:
                    return True
                left = driver.wake - driver.clock()
                if left <= 0:
                    return True
                self.news.wait(min(left, 1.0))
            # A program that ends without waiting for its requests does not want them.
            self.running = False
            return False

    def _deliver(self, transition: Transition) -> None:
        now = self.driver.state.time
        for reason in transition.reasons:
            if isinstance(reason, Admitted) and (job := self.jobs.get(reason.id)) is not None:
                job.started = now if job.started is None else job.started
        for command in transition.commands:
            if not isinstance(command, Emit):
                continue
            for (name, sample), tokens in zip(command.ids, command.tokens, strict=True):
                if tokens and (job := self.jobs.get(name)) is not None:
                    job.feed(sample, tokens)
            touched = {name for name, _ in command.ids}
            for done in command.finished:
                touched.add(done.id)
                if (job := self.jobs.get(done.id)) is not None:
                    job.finish(done)
            for name in touched:
                self._flush(name, now)

    def _flush(self, name: str, now: float) -> None:
        job = self.jobs.get(name)
        if job is None:
            return
        for event in job.flush(now):
            self.driver.post(event)
        if job.finished:
            del self.jobs[name]
            for ended in self.on_end:
                ended(job)

    def _die(self, error: BaseException) -> None:
        with self.news:
            self.dead, self.running = error, False
            jobs, self.jobs = list(self.jobs.values()), {}
        for job in jobs:
            broke = EngineDeadError(f"the engine broke: {error!r}")
            broke.__cause__ = error  # its traceback says where: in a policy, for example
            job.fail(broke)


class _ClosedError(Exception):
    """Why a worker that was closed serves nobody."""

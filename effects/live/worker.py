"""A driver in a thread of its own, which lives only while there is work.

An interrupt (Ctrl-C) may cut the main thread anywhere, and half a turn would leave
executor and state disagreeing; so the main thread only waits, and no signal handler is
needed.
"""

import gc
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import repeat
from typing import Final

from minfer.effects.live.driver import Driver, quiet_collector
from minfer.effects.live.edge import RequestError
from minfer.effects.text.assembly import Assembly
from minfer.messages import Admitted, Cancel, Emit, Preempted, Submit, clip
from minfer.schedule import waits_for
from minfer.state import EngineState, Transition

SWEEP_EVERY: Final = 60.0  # seconds; a server that is never idle leaves cycles behind too


class EngineDeadError(RuntimeError):
    """The engine is closed, or broke; it serves nobody any more."""


class Worker:
    """Serves requests through a driver. Every method may be called from any thread."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.jobs: dict[str, Assembly] = {}
        self.news = (
            threading.Condition()
        )  # guards all below; notified when events are posted
        self.thread: threading.Thread | None = None  # the last one that was started
        self.running = self.closed = False
        self.dead: BaseException | None = None
        # Seconds in which somebody waited, by what the first in line waited for; never
        # changed.
        self.waits: Mapping[str, float] = {}
        # Called in the engine's thread, once outputs are out: with each turn, and each
        # request that has ended. The engine breaks if they raise.
        self.observers: list[Callable[[Transition], None]] = []
        self.on_end: list[Callable[[Assembly], None]] = []

    def submit(self, jobs: list[Assembly]) -> None:
        """Serve requests: all of them enter the same turn, or none. Raises as `check`
        does.
        """
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
        """Raise EngineDeadError, or RequestError if a request with such an id is being
        served.
        """
        if self.dead is not None:
            raise EngineDeadError(
                f"the engine serves nobody any more: {self.dead}"
            ) from self.dead
        if job.request.id in self.jobs:
            name = clip(job.request.id)
            raise RequestError(
                f"a request with the id {name!r} is being served; ids must differ"
            )

    def cancel(self, ids: Iterable[str]) -> None:
        """End requests; their outputs come as they are, with the finish reason
        "cancelled".
        """
        with self.news:
            self.driver.inbox.extend(Cancel(name) for name in ids if name in self.jobs)
            if self.driver.busy:
                self._wake()

    def drop(self, jobs: Iterable[Assembly]) -> None:
        """Cancel requests and wait until they are gone: nobody wants their outputs."""
        # One that was refused for its id must not take the other one of that id with it.
        names = [job.request.id for job in jobs if self.jobs.get(job.request.id) is job]
        self.cancel(names)
        with self.news:
            while self.running and not self.jobs.keys().isdisjoint(names):
                self.news.wait(0.02)

    def close(self) -> None:
        """Cancel everything, let the thread end, and let go of the executor.
        Idempotent.
        """
        with self.news:
            self.dead = self.dead or EngineDeadError(
                "it was closed"
            )  # so that nobody comes in yet
        self.cancel(list(self.jobs))
        if self.thread is not None:
            self.thread.join()
        with self.news:
            if not self.closed:
                self.driver.close()
            self.closed = True

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
        swept = time.monotonic()
        try:
            with quiet_collector():
                while self._has_work():
                    if time.monotonic() - swept > SWEEP_EVERY:
                        gc.collect()
                        swept = time.monotonic()
                    self._turn()
        except BaseException as error:  # whoever waits must hear of it, whatever it is
            self._broke(error)

    def _turn(self) -> None:
        before, transition = self.driver.state, self.driver.turn()
        self._account(before, transition)
        self._deliver(transition)
        for observe in self.observers:
            observe(transition)

    def _broke(self, error: BaseException) -> None:
        with self.news:
            self.dead, self.running = error, False
            jobs, self.jobs = list(self.jobs.values()), {}
        for job in jobs:
            broke = EngineDeadError(f"the engine broke: {error!r}")
            broke.__cause__ = error  # its traceback says where: in a policy, for example
            job.fail(broke)

    def _has_work(self) -> bool:
        """Wait until a turn is due; False ends the thread."""
        driver = self.driver
        with self.news:
            # A program that ends without waiting for its requests does not want them.
            while driver.busy and threading.main_thread().is_alive():
                idle = not driver.state.inflight and not driver.inbox
                left = (driver.wake or 0.0) - driver.clock() if idle else 0.0
                if left <= 0:
                    return True
                self.news.wait(min(left, 1.0))
            self.running = False
            return False

    def _account(self, before: EngineState, transition: Transition) -> None:
        """Note who came in line, who was let in, and how long that took."""
        now = transition.state.time
        if before.waiting:
            cause = waits_for(self.driver.config, before)
            self.waits = {
                **self.waits,
                cause: self.waits.get(cause, 0.0) + now - before.time,
            }
        for event in self.driver.taken:
            if isinstance(event, Submit) and event.request.id in self.jobs:
                self.jobs[event.request.id].line = self.waits
        for reason in transition.reasons:
            if isinstance(reason, Admitted | Preempted) and reason.id in self.jobs:
                self.jobs[reason.id].note(reason, now, self.waits)

    def _deliver(self, transition: Transition) -> None:
        now = self.driver.state.time
        for emit in (one for one in transition.commands if isinstance(one, Emit)):
            # In the order of the batch: that of a set would differ from process to
            # process.
            news = dict[str, Assembly]()
            logprobs = emit.logprobs or repeat(())
            each = zip(emit.ids, emit.tokens, logprobs, strict=False)  # endless, if none
            for (name, sample), tokens, beside in each:
                if tokens and (job := self.jobs.get(name)) is not None:
                    job.feed(sample, tokens, now, beside)
                    if job.eager:
                        news[name] = job
            for done in emit.finished:
                if (job := self.jobs.get(done.id)) is not None:
                    job.finish(done)
                    news[done.id] = job
            for job in news.values():
                self.driver.inbox.extend(job.flush(self.jobs.pop))
                if job.finished:
                    for ended in self.on_end:
                        ended(job)

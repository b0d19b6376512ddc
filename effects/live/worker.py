"""The engine client's form in this process: a driver in a thread of its own, which lives
only while there is work.

An interrupt (Ctrl-C) may cut the main thread anywhere, and half a turn would leave
executor and state disagreeing; so the main thread only waits, and no signal handler is
needed.
"""

import gc
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

from minfer.effects.live.client import About, Died, Listener, Message, News, Snapshot
from minfer.effects.live.compiling import Compiling
from minfer.effects.live.driver import Driver, prompt_switches, quiet_collector
from minfer.effects.live.emits import column_of, joined, logprobs_of, pooled_of
from minfer.effects.live.errors import (
    PROGRAM_ENDS,
    DrainingError,
    OverloadedError,
    RequestError,
)
from minfer.effects.live.errors import EngineDeadError as EngineDeadError
from minfer.effects.live.journal_writer import Writer
from minfer.effects.live.totals import Tally
from minfer.effects.text.grammars.store import Grammars
from minfer.messages import (
    Admitted,
    Cancel,
    Emit,
    Event,
    Finish,
    Submit,
    clip,
)
from minfer.request import Request
from minfer.runs.drafts import Drafted, drafted
from minfer.schedule import waits_for
from minfer.state import EngineState, Transition

SWEEP_EVERY: Final = 60.0  # seconds; a server that is never idle leaves cycles behind too
POLL: Final = 0.02  # seconds from one look to the next, of who waits for the end


class Worker:
    """An `EngineClient` over a driver in this process."""

    def __init__(
        self,
        driver: Driver,
        journal: Writer | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """`journal` is what the driver's turns are recorded by, if that is one;
        `grammars` compile what requests are constrained by, before they come in line.
        """
        self.driver = driver
        driver.masks.listen(self._stir)
        self.compiling = Compiling(grammars)
        self.journal = journal
        self.listeners: list[Listener] = []
        self.early = False  # news of who starts come before the step
        self.tally = Tally()
        # Guards all below, and is notified when events are posted.
        self.posted = threading.Condition()
        self.served: dict[str, float] = {}  # requests, with when they came
        self.thread: threading.Thread | None = None  # the last one that was started
        self.running = False  # the thread
        self.draining = False
        self.closed = False
        self.resets = 0
        self.dead: BaseException | None = None
        self.untold: Died | None = None  # of its death, as long as the lock is held
        self.posting = 0  # how many calls, one within the other, hold the lock to post
        # Seconds in which somebody waited, by what who was next in line waited for; made
        # anew, never changed.
        self.waits: Mapping[str, float] = {}

    # --- what callers ask for -----------------------------------------------------------

    @property
    def unready(self) -> str:
        """As `EngineClient` says."""
        return ""

    @property
    def working(self) -> bool:
        """As `EngineClient` says."""
        return self.running or len(self.compiling) > 0

    def clock(self) -> float:
        """As `EngineClient` says."""
        return self.driver.clock()

    def listen(self, listener: Listener, *, early: bool = False) -> None:
        """As `EngineClient` says."""
        self.listeners.append(listener)
        self.early = self.early or early

    def check(self, request: Request) -> None:
        """As `EngineClient` says."""
        self._check_served(request)
        waiting = len(self.driver.state.waiting)
        most = self.driver.config.max_waiting
        if waiting + request.n > most:
            why = f"{waiting} samples wait already, of at most {most} (max_waiting)"
            raise OverloadedError(f"{why}; try again later")

    def submit(self, requests: Sequence[Request]) -> None:
        """As `EngineClient` says."""
        with self._posting():
            for request in requests:
                self._check_served(request)
            now = self.driver.clock()
            for request in requests:
                self.served[request.id] = now
            if not self.compiling.hold(requests, self._compiled):
                self._enter(requests)

    def cancel(self, ids: Iterable[str]) -> frozenset[str]:
        """As `EngineClient` says."""
        with self._posting():
            known = [name for name in ids if name in self.served]
            self._compiled(known)  # else it could not be ended
            self.driver.inbox.extend(map(Cancel, known))
            if self.driver.busy:
                self._wake()
            return frozenset(known)

    def finish(self, ends: Sequence[Finish]) -> None:
        """As `EngineClient` says."""
        with self._posting():
            self.driver.inbox.extend(one for one in ends if one.id in self.served)
            if self.driver.busy:
                self._wake()

    def reset_cache(self) -> None:
        """As `EngineClient` says."""
        with self.posted:
            self._check_alive()
            self.resets += 1

    def snapshot(self) -> Snapshot:
        """As `EngineClient` says."""
        driver = self.driver
        state = driver.state
        now = driver.clock()
        waiting_for = {}
        if waiting := len(state.waiting):
            waiting_for = {"turn": waiting - 1, waits_for(driver.config, state): 1}
        journal = self.journal
        return Snapshot(
            time=now,
            dead="" if self.dead is None else repr(self.dead),
            draining=self.draining,
            requests=len(self.served),
            running=len(state.running),
            waiting=waiting,
            waiting_for=waiting_for,
            blocks=driver.config.num_blocks,
            blocks_free=state.blocks.available,
            blocks_cached=state.blocks.idle,
            resets=self.resets,
            stalled=self._stalled(now),
            failing=self.tally.failing,
            totals=self.tally.totals(),
            journal_writing=None if journal is None else journal.failed is None,
            journal_errors=0 if journal is None else journal.errors,
        )

    def drain(self, timeout: float | None = None) -> bool:
        """As `EngineClient` says."""
        end = None if timeout is None else time.monotonic() + timeout
        with self.posted:
            self.draining = True
            while self.working and (end is None or time.monotonic() < end):
                self.posted.wait(POLL)
            return not self.working

    def close(self) -> None:
        """As `EngineClient` says."""
        with self._posting():  # nobody comes in from now on
            self._compiled(list(self.served))
            self.dead = self.dead or EngineDeadError("it was closed")
        self.cancel(list(self.served))
        if self.thread is not None:
            self.thread.join()
        with self.posted:
            if not self.closed:
                self.driver.close()
            self.closed = True

    # --- the thread ---------------------------------------------------------------------

    def _stir(self, event: Event) -> None:
        """Have the engine told something that is not a client's."""
        with self._posting():
            self.driver.post(event)
            if self.driver.busy:
                self._wake()

    @contextmanager
    def _posting(self) -> Iterator[None]:
        """Hold the lock, to have the engine told something. Listeners are told of a death
        without it: they take theirs, and others who hold those come here.
        """
        with self.posted:
            self.posting += 1
            try:
                yield
            finally:
                self.posting -= 1
            outermost = not self.posting
        if outermost:
            self._tell_death()

    def _enter(self, requests: Sequence[Request]) -> None:
        """Have requests come in line; the caller holds the lock."""
        now = self.driver.clock()
        for request in requests:
            self.served[request.id] = now
            self.driver.post(Submit(request))
        self._wake()

    def _compiled(self, ids: Iterable[str]) -> None:
        """Those of these that wait for their grammars do so no more."""
        with self._posting():
            for batch in self.compiling.release(ids):
                self._enter(batch)

    def _check_alive(self) -> None:
        if self.dead is not None:
            raise EngineDeadError(
                f"the engine serves nobody any more: {self.dead}"
            ) from self.dead

    def _check_served(self, request: Request) -> None:
        """Raise EngineDeadError, or RequestError for an id that is being served."""
        self._check_alive()
        if self.draining:
            raise DrainingError("the engine finishes what it serves, and takes no more")
        if request.id in self.served:
            name = clip(request.id)
            raise RequestError(
                f"a request with the id {name!r} is being served; ids must differ"
            )

    def _stalled(self, now: float) -> float:
        """Seconds without a step although somebody waits for one; see `Snapshot`."""
        served = list(self.served.items())
        # Who waits for a grammar waits for no step.
        came = [at for name, at in served if name not in self.compiling]
        policy_waits = self.driver.wake is not None and self.driver.wake > now
        if not came or policy_waits:
            return 0.0
        return max(0.0, now - max(self.tally.moved, min(came)))

    def _wake(self) -> None:
        """Start the thread if it does not run; the caller holds the lock."""
        alive = self.running and self.thread is not None and self.thread.is_alive()
        if not alive and self.dead is None:
            # At the interpreter's end a new thread would never come to run.
            if not threading.main_thread().is_alive():
                self._leave()
                return
            self.running = True
            self.thread = threading.Thread(target=self._run, name="minfer-engine")
            self.thread.start()
        self.posted.notify_all()

    def _leave(self) -> None:
        """The program ends with requests for which nobody has waited; the caller holds
        the lock, and tells of it then. Threads that are in need of an answer get one, and
        can end.
        """
        self._die(EngineDeadError(PROGRAM_ENDS), PROGRAM_ENDS)

    def _run(self) -> None:
        swept = time.monotonic()
        try:
            with quiet_collector(), prompt_switches():
                while self._has_work():
                    if time.monotonic() - swept > SWEEP_EVERY:
                        gc.collect()
                        swept = time.monotonic()
                    self._turn()
        except BaseException as error:  # whoever waits must hear of it, whatever it is
            self._broke(error)

    def _has_work(self) -> bool:
        """Wait until a turn is due; False ends the thread."""
        driver = self.driver
        with self.posted:
            # A program that ends without waiting for its requests does not want them.
            while driver.busy and threading.main_thread().is_alive():
                idle = not driver.state.inflight and not driver.inbox
                left = (driver.wake or 0.0) - driver.clock() if idle else 0.0
                if idle and driver.wake is None and driver.state.paused:
                    left = POLL  # until a mask is there, which is an event
                if left <= 0:
                    return True
                self.posted.wait(min(left, 1.0))
            self.running = False
            if driver.busy:
                self._leave()
        self._tell_death()
        return False

    def _turn(self) -> None:
        before = self.driver.state
        transition = self.driver.turn(partial(self._decided, before))
        drafts = drafted(before, self.driver.taken, transition)
        if (news := self._news_of(transition, drafts)) is not None:
            self._tell(news)
        self.tally.turn(transition)
        self.tally.drafted(drafts)

    def _decided(self, before: EngineState, transition: Transition) -> None:
        """Before anything of it is done: keep accounts, and tell who starts."""
        self._account(before, transition.state)
        if self._is_early(transition):
            self._tell(
                News(
                    time=transition.state.time,
                    arrived=self._arrived(),
                    reasons=_reasons(transition),
                    waits=self.waits,
                )
            )

    def _is_early(self, transition: Transition) -> bool:
        """Whether who came and why somebody waits is told before the turn's step runs."""
        starts = any(isinstance(one, Admitted) for one in transition.reasons)
        return self.early and starts

    def _arrived(self) -> tuple[str, ...]:
        """The requests that came in line in the last turn."""
        taken = self.driver.taken
        return tuple(event.request.id for event in taken if isinstance(event, Submit))

    def _tell(self, message: Message) -> None:
        for hear in self.listeners:
            hear(message)

    def _broke(self, error: BaseException) -> None:
        with self.posted:
            self._die(error, f"the engine broke: {error!r}")
        self._tell_death()

    def _die(self, error: BaseException, why: str) -> None:
        """Serve nobody any more; the caller holds the lock, and tells of it then."""
        self.dead = error
        self.running = False
        ids = tuple(self.served)
        self.compiling.release(ids)
        self.served = {}
        self.untold = Died(ids, why)

    def _tell_death(self) -> None:
        """Tell of a death that nobody was told of; the caller does not hold the lock."""
        with self.posted:
            died, self.untold = self.untold, None
        if died is not None:
            self._tell(died)

    def _account(self, before: EngineState, after: EngineState) -> None:
        """Note how long somebody has waited, and what for."""
        if before.waiting:
            cause = waits_for(self.driver.config, before)
            spent = self.waits.get(cause, 0.0) + after.time - before.time
            self.waits = {**self.waits, cause: spent}

    def _news_of(self, transition: Transition, drafts: Sequence[Drafted]) -> News | None:
        """What a turn brought, if anything. Ids of requests that ended are free."""
        emits = [one for one in transition.commands if isinstance(one, Emit)]
        early = self._is_early(transition)  # then that was said
        reasons = () if early else _reasons(transition)
        arrived = () if early else self._arrived()
        finished = tuple(done for emit in emits for done in emit.finished)
        for done in finished:
            if done.id not in transition.state.requests:
                self.served.pop(done.id, None)
        ids = joined([emit.ids for emit in emits])
        if not (ids or finished or arrived or reasons):
            return None
        return News(
            time=transition.state.time,
            ids=ids,
            tokens=joined([emit.tokens for emit in emits]),
            logprobs=logprobs_of(emits),
            pooled=pooled_of(emits),
            drafts=column_of(drafts, ids),
            finished=finished,
            arrived=arrived,
            reasons=reasons,
            waits=self.waits,
        )


def _reasons(transition: Transition) -> tuple[About, ...]:
    """What the engine says of requests besides their tokens and ends."""
    return tuple(one for one in transition.reasons if isinstance(one, About))

"""The engine client in this process: a driver in a thread of its own, which lives only
while there is work.

An interrupt (Ctrl-C) may stop the main thread anywhere, and half a turn would leave
executor and state inconsistent; so the main thread only waits, and no signal handler is
needed.
"""

import gc
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from attrs import evolve

from minfer.analysis.drafts import step_drafts
from minfer.effects.execution.contract import counts_of
from minfer.effects.execution.tiers.keyed_store import KeyedStore
from minfer.effects.live.client import Listener, Snapshot
from minfer.effects.live.constraints.compiling_requests import CompilingRequests
from minfer.effects.live.engine.driver import Driver
from minfer.effects.live.engine.host_adapters import HostAdapters
from minfer.effects.live.engine.interpreter import paused_collector, short_switch_interval
from minfer.effects.live.engine.reporting import OutputReporter
from minfer.effects.live.errors import PROGRAM_ENDED_MESSAGE, DrainingError, check_queue
from minfer.effects.live.errors import EngineDeadError as EngineDeadError
from minfer.effects.live.journal.journal_writer import JournalWriter
from minfer.effects.live.request_registry import RequestRegistry, RequestStage
from minfer.effects.live.totals import Totals, TotalsCounter, sum_totals
from minfer.effects.text.grammars.store import Grammars
from minfer.planning.schedule import queue_blocked_by
from minfer.records.messages import (
    Cancel,
    DropAdapter,
    Event,
    Finish,
    Finished,
    Submit,
)
from minfer.records.request import KvTransfer, Request
from minfer.records.state import EngineState, Transition

COLLECT_SECONDS: Final = 60.0  # a server that is never idle creates cycles, too
POLL_SECONDS: Final = 0.02  # between two checks while waiting for the end


class EngineWorker:
    """An `EngineClient` over a driver in this process."""

    def __init__(
        self,
        driver: Driver,
        journal: JournalWriter | None = None,
        grammars: Grammars | None = None,
        store: KeyedStore | None = None,
        adapters: HostAdapters | None = None,
    ) -> None:
        """`journal` is the driver's recorder, if that is a journal; `grammars` compile
        the requests' constraints, before the requests enter the waiting queue; `store`
        has the blocks of the external store, and `adapters` those that requests name.
        """
        self.driver = driver
        driver.deferred.masks.listen(self._post_event)
        driver.report = self._post_event
        self.live = RequestRegistry()
        self.compiling = CompilingRequests(grammars, self.live)
        self.journal = journal
        self.store = store
        self.adapters = adapters
        if adapters is not None:
            driver.load_adapter = adapters.load
        self.tally = TotalsCounter()
        # Each gets every turn, once its outputs were sent: the state before, and what
        # the turn did.
        self.turn_listeners: list[Callable[[EngineState, Transition], None]] = []
        # Guards all attributes below, and is notified when events are posted.
        self.posted = threading.Condition()
        self.reporter = OutputReporter(driver.config, self.posted)
        self.thread: threading.Thread | None = None  # the last one started
        self.running = False  # the thread
        self.draining = False
        self.closed = False
        self.resets = 0
        self.dead: BaseException | None = None

    # --- what callers ask for -----------------------------------------------------------

    @property
    def unready(self) -> str:
        """As `EngineClient` says."""
        return ""

    @property
    def machine(self) -> str:
        """As `EngineClient` says."""
        return socket.gethostname()

    @property
    def working(self) -> bool:
        """As `EngineClient` says."""
        return self.running or len(self.compiling) > 0

    def clock(self) -> float:
        """As `EngineClient` says."""
        return self.driver.clock()

    def listen(self, listener: Listener, *, early: bool = False) -> None:
        """As `EngineClient` says."""
        self.reporter.listen(listener, early=early)

    def check(self, request: Request) -> None:
        """As `EngineClient` says."""
        self._check_served(request)
        waiting = len(self.driver.state.waiting)
        check_queue(waiting, request.n, self.driver.config.max_waiting)

    def submit(self, requests: Sequence[Request]) -> None:
        """As `EngineClient` says."""
        # They ask the system: neither in the engine's thread, nor with the lock.
        for request in requests:
            self._push_when_computed(request)
        stored = [self._stored(request) for request in requests]
        with self.reporter.locked():
            for request in requests:
                self._check_served(request)
            now = self.driver.clock()
            for request, count in zip(requests, stored, strict=True):
                record = self.live.add(request)
                record.arrived, record.stored = now, count
            if not self.compiling.wait_for_grammars(requests, self._post_compiled):
                self._post_requests(requests)

    def cancel(self, ids: Iterable[str]) -> frozenset[str]:
        """As `EngineClient` says."""
        with self.reporter.locked():
            served = [name for name in ids if self.live.is_served(name)]
            self._post_compiled(served)  # else they could not be ended
            self.driver.inbox.extend(map(Cancel, served))
            if self.driver.busy:
                self._wake()
            return frozenset(served)

    def finish(self, ends: Sequence[Finish]) -> None:
        """As `EngineClient` says."""
        with self.reporter.locked():
            self.driver.inbox.extend(end for end in ends if self.live.is_served(end.id))
            if self.driver.busy:
                self._wake()

    def reset_cache(self) -> None:
        """As `EngineClient` says."""
        with self.posted:
            self._check_alive()
            self.resets += 1

    def drop_adapter(self, digest: str) -> None:
        """As `EngineClient` says."""
        event = DropAdapter(digest)
        if self.adapters is not None:
            self.adapters.forget(digest)
            self._post_event(event)

    def snapshot(self) -> Snapshot:
        """As `EngineClient` says."""
        driver = self.driver
        state = driver.state
        now = driver.clock()
        waiting_for = {}
        if waiting := len(state.waiting):
            waiting_for = {"turn": waiting - 1, queue_blocked_by(driver.config, state): 1}
        journal = self.journal
        slots = state.adapters.slots
        running_adapters = tuple(sorted(slot.adapter for slot in slots if slot.users))
        return Snapshot(
            time=now,
            dead="" if self.dead is None else repr(self.dead),
            draining=self.draining,
            requests=len(self.live.served()),
            running=len(state.running),
            waiting=waiting,
            waiting_for=waiting_for,
            blocks=driver.config.num_blocks,
            blocks_free=state.blocks.available,
            blocks_cached=state.blocks.idle,
            resets=self.resets,
            stalled=self._stalled(now),
            failing=self.tally.failing,
            totals=self._totals(),
            journal_writing=None if journal is None else journal.failed is None,
            journal_errors=0 if journal is None else journal.errors,
            running_adapters=running_adapters,
            waiting_adapters=self._waiting_adapters(running_adapters),
        )

    def _waiting_adapters(self, running: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the adapters of requests of which no sample runs."""
        if not self.driver.config.adapter_slots:
            return ()
        records = self.live.served().values()
        named = {record.request.adapter for record in records}
        return tuple(sorted(named - {"", *running}))

    def _totals(self) -> Totals:
        counts = [counts_of(self.driver.executor)]
        if self.store is not None:
            counts.append(self.store.totals())
        others = [Totals(numbers, {}) for numbers in counts if numbers]
        return sum_totals([self.tally.totals(), *others])

    def drain(self, timeout: float | None = None) -> bool:
        """As `EngineClient` says."""
        end = None if timeout is None else time.monotonic() + timeout
        with self.posted:
            self.draining = True
            while self.working and (end is None or time.monotonic() < end):
                self.posted.wait(POLL_SECONDS)
            return not self.working

    def close(self) -> None:
        """As `EngineClient` says."""
        with self.reporter.locked():  # no requests enter from now on
            self._post_compiled(self.live.served())
            self.dead = self.dead or EngineDeadError("it was closed")
        self.cancel(self.live.served())
        if self.thread is not None:
            self.thread.join()
        with self.posted:
            is_first_close, self.closed = not self.closed, True
        if is_first_close:  # without the lock: the ends of transfers are posted meanwhile
            if self.adapters is not None:
                self.adapters.close()
            self.driver.close()

    def _push_when_computed(self, request: Request) -> None:
        """Have the store send the blocks of a prompt to the engine that is to decode it,
        if there is one, as they are computed.
        """
        transfer = request.kv_transfer
        if self.store is None or transfer is None or not request.reads_cache:
            return
        if transfer.push_to:
            self.store.want(request.keys[transfer.first_block :], transfer.push_to)

    def _stored(self, request: Request) -> int:
        """Returns how many leading blocks of a prompt are in the store."""
        if self.store is None or not request.reads_cache:
            return 0
        return self.store.leading(request.keys)

    # --- the thread ---------------------------------------------------------------------

    def _post_event(self, event: Event) -> None:
        """Post an event that is not a client's."""
        with self.reporter.locked():
            self.driver.post(event)
            if self.driver.busy:
                self._wake()

    def _post_requests(self, requests: Sequence[Request]) -> None:
        """Enter requests into the engine; the caller holds the lock."""
        now = self.driver.clock()
        for request in requests:
            record = self.live[request.id]
            record.arrived, record.stage = now, RequestStage.SUBMITTED
            if record.stored:
                transfer = request.kv_transfer or KvTransfer()
                transfer = evolve(transfer, num_stored_blocks=record.stored)
                request = evolve(request, kv_transfer=transfer)
            self.driver.post(Submit(request))
        self._wake()

    def _post_compiled(self, ids: Iterable[str]) -> None:
        """Enter those of these requests that waited for their grammars."""
        with self.reporter.locked():
            for batch in self.compiling.release(ids):
                self._post_requests(batch)

    def _check_alive(self) -> None:
        if self.dead is not None:
            raise EngineDeadError(f"the engine has stopped: {self.dead}") from self.dead

    def _check_served(self, request: Request) -> None:
        """Raise EngineDeadError, or RequestError for an id that is being served."""
        self._check_alive()
        if self.draining and not request.continues:
            raise DrainingError("the engine finishes what it serves, and takes no more")
        self.live.check_new(request)

    def _stalled(self, now: float) -> float:
        """Returns the seconds without a step although requests wait for one; see
        `Snapshot`.
        """
        # Requests that wait for a grammar wait for no step.
        records = self.live.served().values()
        arrivals = [
            record.arrived for record in records if record.stage is RequestStage.SUBMITTED
        ]
        policy_waits = self.driver.wake is not None and self.driver.wake > now
        if not arrivals or policy_waits:
            return 0.0
        return max(0.0, now - max(self.tally.last_step_time, min(arrivals)))

    def _wake(self) -> None:
        """Start the thread if it does not run; the caller holds the lock."""
        alive = self.running and self.thread is not None and self.thread.is_alive()
        if not alive and self.dead is None:
            # At the interpreter's end a new thread would never run.
            if not threading.main_thread().is_alive():
                self._end_with_program()
                return
            self.running = True
            self.thread = threading.Thread(target=self._run, name="minfer-engine")
            self.thread.start()
        self.posted.notify_all()

    def _end_with_program(self) -> None:
        """End all requests, as the program ends without waiting for them; the caller
        holds the lock, and reports it then. Threads that wait for an answer get one, and
        can end.
        """
        self._stop_serving(EngineDeadError(PROGRAM_ENDED_MESSAGE), PROGRAM_ENDED_MESSAGE)

    def _run(self) -> None:
        collected_at = time.monotonic()
        try:
            with paused_collector(), short_switch_interval():
                while self._has_work():
                    if time.monotonic() - collected_at > COLLECT_SECONDS:
                        gc.collect()
                        collected_at = time.monotonic()
                    self._turn()
        except BaseException as error:  # any error: readers must be notified
            self._fail(error)

    def _has_work(self) -> bool:
        """Wait until a turn is due; False ends the thread."""
        driver = self.driver
        with self.posted:
            # A program that ends without waiting for its requests does not need them.
            while driver.busy and threading.main_thread().is_alive():
                is_idle = not driver.state.inflight and not driver.inbox
                wait_seconds = (driver.wake or 0.0) - driver.clock() if is_idle else 0.0
                state = driver.state
                awaits_event = (
                    state.paused
                    or state.tiers.transfers
                    or any(slot.loading for slot in state.adapters.slots)
                )
                if is_idle and driver.wake is None and awaits_event:
                    # Until an event reports a mask, moved blocks or an adapter.
                    wait_seconds = POLL_SECONDS
                if wait_seconds <= 0:
                    return True
                self.posted.wait(min(wait_seconds, 1.0))
            self.running = False
            if driver.busy:
                self._end_with_program()
        self.reporter.report_death()
        return False

    def _turn(self) -> None:
        driver, reporter = self.driver, self.reporter
        before = driver.state
        transition = driver.turn(
            lambda transition: reporter.report_admissions(
                before, driver.last_events, transition
            )
        )
        drafts = step_drafts(before, driver.last_events, transition)
        if (
            outputs := reporter.outputs_of(driver.last_events, transition, drafts)
        ) is not None:
            self._free(outputs.finished, transition.state)
            reporter.send(outputs)
        for listener in self.turn_listeners:
            listener(before, transition)
        self.tally.count_turn(transition)
        self.tally.count_drafts(drafts)

    def _free(self, finished: Iterable[Finished], state: EngineState) -> None:
        """Free the ids of requests that ended."""
        for end in finished:
            if end.id not in state.requests:
                self.live.end(end.id)

    def _fail(self, error: BaseException) -> None:
        with self.posted:
            self._stop_serving(error, f"the engine broke: {error!r}")
        self.reporter.report_death()

    def _stop_serving(self, error: BaseException, reason: str) -> None:
        """Stop serving; the caller holds the lock, and reports it then."""
        self.dead = error
        self.running = False
        ids = tuple(self.live.served())
        self.compiling.release(ids)
        for name in ids:
            self.live.end(name)
        self.reporter.note_death(ids, reason)

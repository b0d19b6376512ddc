"""The grammars of a model: compiled in a few threads, and cached.

Compiling is bounded (`llguidance_compiler.py`) and lets other threads run, but it takes a
while, and so does reading the vocabulary at first: a thread that steps an engine, or runs
an event loop, must not wait for it. `begin` is for those; `get` is for threads that may.

Theory. Each `begin` returns a future of its own, which waits in the queue of its client;
clients take turns. To leave is to cancel that future; a constraint without waiters is not
compiled, unless that has begun: then the result is kept as any other.

    begin ---> queue ---> a thread's turn ---> compiled ---> all waiters, cache
      cancelled: out of the queue
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Final

from attrs import define, field

from minfer.effects.text.grammars.grammar_library import (
    Compiler,
    Grammar,
    GrammarError,
    Matcher,
    MatcherUpdate,
)
from minfer.effects.text.grammars.idle_matchers import IdleMatchers
from minfer.effects.text.grammars.job_threads import JobThreads
from minfer.effects.text.job_queue import JobQueue, QueuedJob
from minfer.sampling.structured import StructuredOutputs

if TYPE_CHECKING:
    from minfer.effects.text.grammars.mask_lines import Lines

MAX_GRAMMARS: Final = 256  # grammars: constraints, and that they compile
COMPILE_THREADS: Final = 2
MAX_WAITING: Final = 64  # in the queue, beyond which a server should refuse more
CLIENT_SHARE: Final = 2  # a client may have MAX_WAITING // CLIENT_SHARE of these


@define(eq=False)
class _Compilation:
    """A constraint that is not compiled yet, and its waiters."""

    constraint: StructuredOutputs
    running: bool = False
    done: "Future[Grammar]" = field(factory=Future)
    waits: "dict[Future[Grammar], QueuedJob[_Compilation] | None]" = field(factory=dict)


class Grammars:
    """The compiled constraints of one vocabulary. Safe to use from any thread."""

    def __init__(self, make: Callable[[], Compiler]) -> None:
        """`make` loads the library, and raises GrammarError if there is none."""
        self._make = make
        self._compiler: Compiler | None = None
        self._loading = threading.Lock()
        self._lock = threading.Lock()  # never held while a future is resolved
        self._grammars: OrderedDict[StructuredOutputs, Future[Grammar]] = OrderedDict()
        self._jobs: dict[StructuredOutputs, _Compilation] = {}
        self._queue = JobQueue[_Compilation]()
        self._pool: JobThreads | None = None
        self._idle = IdleMatchers()

    def load(self) -> None:
        """Read the vocabulary, which other threads have to wait for. Raises
        GrammarError.
        """
        self._loaded()

    def begin(self, constraint: StructuredOutputs, client: str = "") -> "Future[Grammar]":
        """Have a constraint compiled at its client's turn, unless it is cached; the
        future has the result, or a GrammarError. To cancel it is to leave.
        """
        with self._lock:
            if (cached := self._cached(constraint)) is not None:
                return cached
            job = self._jobs.setdefault(constraint, _Compilation(constraint))
            wait: Future[Grammar] = Future()
            running, queued = job.running, None
            if not running:
                queued = self._queue.add(job, client, len(constraint.text))
            job.waits[wait] = queued
        wait.add_done_callback(partial(self._remove_waiter, job))
        if not running:
            self._submit_next()
        return wait

    def get(self, constraint: StructuredOutputs) -> Grammar:
        """A constraint, compiled: in this thread if no other compiles it, as others may
        be waiting for the threads. Raises GrammarError, which names the field.
        """
        with self._lock:
            future = self._cached(constraint)
            job = None
            if future is None:
                job = self._jobs.setdefault(constraint, _Compilation(constraint))
                future = job.done
                if job.running:
                    job = None
                else:
                    self._start(job)
        if job is not None:
            self._run(job)
        return future.result()

    def take_idle_matcher(self, constraint: StructuredOutputs) -> Matcher | None:
        """A used matcher of this constraint, for a new output, which costs next to no
        time; None if there is none.
        """
        return self._idle.take(constraint)

    def release_matcher(
        self, constraint: StructuredOutputs, matcher: Matcher, tokens: int
    ) -> None:
        """Keep a matcher for another output; its own has ended after `tokens` tokens."""
        self._idle.put(constraint, matcher, tokens)

    @property
    def words(self) -> int:
        """As `Compiler` says."""
        return self._loaded().words

    @property
    def forbidden_tokens(self) -> frozenset[int]:
        """As `Compiler` says."""
        return self._loaded().forbidden_tokens

    def masks(
        self, updates: Sequence[MatcherUpdate], lines: "Lines"
    ) -> dict[int, GrammarError]:
        """As `Compiler` says, of matchers that were made here."""
        return self._loaded().masks(updates, lines)

    @property
    def pending(self) -> int:
        """The number of constraints that have waiters and are not compiled yet."""
        with self._lock:
            return len(self._jobs)

    def is_full_for(self, client: str) -> bool:
        """Whether a server should refuse more of a client: the queue is full, or the
        client's share of it.
        """
        with self._lock:
            num_waiting = self._queue.count(client)
            return (
                num_waiting >= MAX_WAITING // CLIENT_SHARE
                or len(self._queue) >= MAX_WAITING
            )

    def is_compiled(self, constraint: StructuredOutputs) -> bool:
        """Whether a constraint is compiled already."""
        with self._lock:
            return constraint in self._grammars

    def close(self) -> None:
        """Drop all, and cancel what waits; what is being compiled ends by itself."""
        with self._lock:
            pool, self._pool = self._pool, None
            self._grammars.clear()
            self._idle.clear()
            waits = [wait for job in self._jobs.values() for wait in job.waits]
        for wait in waits:
            wait.cancel()
        if pool is not None:
            pool.close()

    # --- called with the lock held ------------------------------------------------------

    def _cached(self, constraint: StructuredOutputs) -> "Future[Grammar] | None":
        """The result of a constraint, marked as the most recently used."""
        if (future := self._grammars.get(constraint)) is not None:
            self._grammars.move_to_end(constraint)
        return future

    def _start(self, job: _Compilation) -> None:
        """Mark a job as compiling, and take it out of the queue."""
        job.running = True
        for queued in job.waits.values():
            if queued is not None:
                self._queue.remove(queued)

    # --- take the lock ------------------------------------------------------------------

    def _remove_waiter(self, job: _Compilation, wait: "Future[Grammar]") -> None:
        """Remove a waiter that has left, and a job without waiters."""
        if not wait.cancelled():
            return
        with self._lock:
            if (queued := job.waits.pop(wait, None)) is not None:
                self._queue.remove(queued)
            if not job.waits and not job.running:
                self._jobs.pop(job.constraint, None)

    def _submit_next(self) -> None:
        """Have a thread take the next job."""
        with self._lock:
            if self._pool is None:
                self._pool = JobThreads(COMPILE_THREADS, "minfer-grammars")
            pool = self._pool
        pool.submit(self._run_next).add_done_callback(
            partial(self._on_cancelled_turn, pool)
        )

    def _on_cancelled_turn(self, pool: JobThreads, turn: "Future[None]") -> None:
        """Close the store if the program ends before a turn: no other turn will come."""
        if turn.cancelled() and pool is self._pool:
            self.close()

    def _run_next(self) -> None:
        """Compile the job at the head of the queue, if it is not empty by now."""
        with self._lock:
            if (job := self._queue.take()) is None:
                return
            self._start(job)
        self._run(job)

    def _run(self, job: _Compilation) -> None:
        """Compile it, keep the result, and pass it to all waiters."""
        error: BaseException | None = None
        try:
            job.done.set_result(self._loaded().compile(job.constraint))
        except BaseException as raised:  # waiters get it, of whatever type it is
            error = raised
            job.done.set_exception(raised)
        with self._lock:
            del self._jobs[job.constraint]
            if error is None or isinstance(error, GrammarError):
                self._grammars[job.constraint] = job.done
            if len(self._grammars) > MAX_GRAMMARS:
                self._grammars.popitem(last=False)
            waits = tuple(job.waits)
        for wait in waits:
            if not wait.set_running_or_notify_cancel():
                continue
            if error is None:
                wait.set_result(job.done.result())
            else:
                wait.set_exception(error)

    def _loaded(self) -> Compiler:
        with self._loading:
            if self._compiler is None:
                self._compiler = self._make()
            return self._compiler

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

from minfer.effects.text.grammars.idle_matchers import Idle
from minfer.effects.text.grammars.job_threads import Threads
from minfer.effects.text.grammars.protocol import (
    Compiler,
    Grammar,
    GrammarError,
    Matcher,
    Move,
)
from minfer.effects.text.job_queue import Line, Place
from minfer.sampling.structured import StructuredOutputs

if TYPE_CHECKING:
    from minfer.effects.text.grammars.mask_lines import Lines

KEPT: Final = 256  # grammars: constraints, and that they compile
THREADS: Final = 2
MOST_WAITING: Final = 64  # in the queue, beyond which a server should refuse more
SHARE: Final = 2  # a client's share of these: one in so many


@define(eq=False)
class _Job:
    """A constraint that is not compiled yet, and its waiters."""

    asked: StructuredOutputs
    running: bool = False
    done: "Future[Grammar]" = field(factory=Future)
    waits: "dict[Future[Grammar], Place[_Job] | None]" = field(factory=dict)


class Grammars:
    """The compiled constraints of one vocabulary. Safe to use from any thread."""

    def __init__(self, make: Callable[[], Compiler]) -> None:
        """`make` loads the library, and raises GrammarError if there is none."""
        self._make = make
        self._compiler: Compiler | None = None
        self._loading = threading.Lock()
        self._lock = threading.Lock()  # never held while a future is resolved
        self._kept: OrderedDict[StructuredOutputs, Future[Grammar]] = OrderedDict()
        self._jobs: dict[StructuredOutputs, _Job] = {}
        self._line = Line[_Job]()
        self._pool: Threads | None = None
        self._idle = Idle()

    def warm(self) -> None:
        """Read the vocabulary, which other threads have to wait for. Raises
        GrammarError.
        """
        self._loaded()

    def begin(self, asked: StructuredOutputs, client: str = "") -> "Future[Grammar]":
        """Have a constraint compiled at its client's turn, unless it is cached; the
        future has the result, or a GrammarError. To cancel it is to leave.
        """
        with self._lock:
            if (known := self._known(asked)) is not None:
                return known
            job = self._jobs.setdefault(asked, _Job(asked))
            wait: Future[Grammar] = Future()
            running, place = job.running, None
            if not running:
                place = self._line.add(job, client, len(asked.text))
            job.waits[wait] = place
        wait.add_done_callback(partial(self._leave, job))
        if not running:
            self._begin_one()
        return wait

    def get(self, asked: StructuredOutputs) -> Grammar:
        """A constraint, compiled: in this thread if no other compiles it, as others may
        be waiting for the threads. Raises GrammarError, which names the field.
        """
        with self._lock:
            known = self._known(asked)
            job = None
            if known is None:
                job = self._jobs.setdefault(asked, _Job(asked))
                known = job.done
                if job.running:
                    job = None
                else:
                    self._start(job)
        if job is not None:
            self._run(job)
        return known.result()

    def idle(self, asked: StructuredOutputs) -> Matcher | None:
        """A used matcher of this constraint, for a new output, which costs next to no
        time; None if there is none.
        """
        return self._idle.take(asked)

    def give_back(self, asked: StructuredOutputs, matcher: Matcher, tokens: int) -> None:
        """Keep a matcher for another output; its own has ended after so many tokens."""
        self._idle.put(asked, matcher, tokens)

    @property
    def words(self) -> int:
        """As `Compiler` says."""
        return self._loaded().words

    @property
    def never(self) -> frozenset[int]:
        """As `Compiler` says."""
        return self._loaded().never

    def masks(self, moves: Sequence[Move], lines: "Lines") -> dict[int, GrammarError]:
        """As `Compiler` says, of matchers that were made here."""
        return self._loaded().masks(moves, lines)

    @property
    def pending(self) -> int:
        """The number of constraints that have waiters and are not compiled yet."""
        with self._lock:
            return len(self._jobs)

    def crowded(self, client: str) -> bool:
        """Whether a server should refuse more of a client: the queue is full, or the
        client's share of it.
        """
        with self._lock:
            own = self._line.count(client)
            return own >= MOST_WAITING // SHARE or len(self._line) >= MOST_WAITING

    def knows(self, asked: StructuredOutputs) -> bool:
        """Whether a constraint is compiled already."""
        with self._lock:
            return asked in self._kept

    def close(self) -> None:
        """Drop all, and cancel what waits; what is being compiled ends by itself."""
        with self._lock:
            pool, self._pool = self._pool, None
            self._kept.clear()
            self._idle.clear()
            waits = [wait for job in self._jobs.values() for wait in job.waits]
        for wait in waits:
            wait.cancel()
        if pool is not None:
            pool.close()

    # --- what holds the lock when it is called ------------------------------------------

    def _known(self, asked: StructuredOutputs) -> "Future[Grammar] | None":
        """The result of a constraint, marked as the most recently used."""
        if (known := self._kept.get(asked)) is not None:
            self._kept.move_to_end(asked)
        return known

    def _start(self, job: _Job) -> None:
        """Mark a job as compiling, and take it out of the queue."""
        job.running = True
        for place in job.waits.values():
            if place is not None:
                self._line.remove(place)

    # --- what takes it ------------------------------------------------------------------

    def _leave(self, job: _Job, wait: "Future[Grammar]") -> None:
        """Remove a waiter that has left, and a job without waiters."""
        if not wait.cancelled():
            return
        with self._lock:
            if (place := job.waits.pop(wait, None)) is not None:
                self._line.remove(place)
            if not job.waits and not job.running:
                self._jobs.pop(job.asked, None)

    def _begin_one(self) -> None:
        """Have a thread take the next job."""
        with self._lock:
            if self._pool is None:
                self._pool = Threads(THREADS, "minfer-grammars")
            pool = self._pool
        pool.submit(self._next).add_done_callback(partial(self._over, pool))

    def _over(self, pool: Threads, turn: "Future[None]") -> None:
        """Close the store if the program ends before a turn: no other turn will come."""
        if turn.cancelled() and pool is self._pool:
            self.close()

    def _next(self) -> None:
        """Compile the job at the head of the queue, if it is not empty by now."""
        with self._lock:
            if (job := self._line.take()) is None:
                return
            self._start(job)
        self._run(job)

    def _run(self, job: _Job) -> None:
        """Compile it, keep the result, and pass it to all waiters."""
        error: BaseException | None = None
        try:
            job.done.set_result(self._loaded().compile(job.asked))
        except BaseException as raised:  # waiters get it, of whatever type it is
            error = raised
            job.done.set_exception(raised)
        with self._lock:
            del self._jobs[job.asked]
            if error is None or isinstance(error, GrammarError):
                self._kept[job.asked] = job.done
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
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

"""The grammars of a model: compiled in a few threads, and kept for who asks again.

Compiling is bounded (`by_llguidance.py`) and lets other threads run, but it takes a
while, and so does reading the vocabulary at first: nobody who steps an engine, and no
event loop, should wait for it. `begin` is for them, and `get` for who may wait.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from minfer.effects.text.grammars.protocol import Compiler, Grammar, GrammarError, Move
from minfer.structured import StructuredOutputs

KEPT: Final = 256  # grammars: what was asked for, and that it compiles
THREADS: Final = 2
MOST_PENDING: Final = 64  # beyond which a server should take no more


class Grammars:
    """What was compiled for one vocabulary. Safe to use from any thread."""

    def __init__(self, make: Callable[[], Compiler]) -> None:
        """`make` loads the library, and raises GrammarError if there is none."""
        self._make = make
        self._compiler: Compiler | None = None
        self._loading = threading.Lock()
        self._lock = threading.Lock()
        self._kept: OrderedDict[StructuredOutputs, Future[Grammar]] = OrderedDict()
        self._pool: ThreadPoolExecutor | None = None

    def warm(self) -> None:
        """Read the vocabulary, which other threads have to wait for. Raises
        GrammarError.
        """
        self._loaded()

    def begin(self, asked: StructuredOutputs) -> "Future[Grammar]":
        """Have a constraint compiled, unless it was; the result, or a GrammarError."""
        with self._lock:
            if (known := self._kept.get(asked)) is None:
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(THREADS, "minfer-grammars")
                known = self._pool.submit(self._compile, asked)
            self._keep(asked, known)
            return known

    def get(self, asked: StructuredOutputs) -> Grammar:
        """A constraint, compiled: by who asks, if it is not kept, as others may be in
        line for the threads. Raises GrammarError, which names the field.
        """
        with self._lock:
            if (known := self._kept.get(asked)) is not None:
                self._kept.move_to_end(asked)
        if known is None:
            known = Future()
            try:
                known.set_result(self._compile(asked))
            except GrammarError as error:
                known.set_exception(error)
            with self._lock:
                self._keep(asked, known)
        return known.result()

    def masks(self, moves: Sequence[Move]) -> list[bytes | GrammarError]:
        """As `Compiler` says, of matchers that were made here."""
        return self._loaded().masks(moves)

    @property
    def pending(self) -> int:
        """How many constraints wait to be compiled."""
        with self._lock:
            return sum(not one.done() for one in self._kept.values())

    def close(self) -> None:
        """Let go of all; what is being compiled ends by itself."""
        with self._lock:
            pool, self._pool = self._pool, None
            self._kept.clear()
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    def _keep(self, asked: StructuredOutputs, known: "Future[Grammar]") -> None:
        """Keep it as the newest, and no more of those that are done than there may be;
        the caller holds the lock.
        """
        self._kept[asked] = known
        self._kept.move_to_end(asked)
        if len(self._kept) > KEPT:
            oldest = next((one for one, at in self._kept.items() if at.done()), None)
            if oldest is not None:
                del self._kept[oldest]

    def _loaded(self) -> Compiler:
        with self._loading:
            if self._compiler is None:
                self._compiler = self._make()
            return self._compiler

    def _compile(self, asked: StructuredOutputs) -> Grammar:
        return self._loaded().compile(asked)

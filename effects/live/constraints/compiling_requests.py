"""Requests whose grammars are being compiled: they enter the waiting queue afterwards.

Compiling takes from a millisecond to a second. Meanwhile the engine does not know such a
request, so the steps of others do not wait; clients take turns (`store.py`). A cancelled
request enters at once, so that its end is reported as usual, and its grammar is not
compiled, unless others wait for it too. A request whose grammar cannot be compiled
enters, too: it ends with an error when its first mask is due.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

from attrs import frozen

from minfer.effects.live.request_registry import RequestRegistry, RequestStage
from minfer.effects.text.grammars.grammar_library import Grammar
from minfer.effects.text.grammars.store import Grammars
from minfer.records.request import Request

Requests = tuple[Request, ...]
Compilation = Future[Grammar]


@frozen(eq=False)
class PendingBatch:
    """Waiting requests, and the grammars that they wait for."""

    batch: Requests
    begun: tuple[Compilation, ...]


class CompilingRequests:
    """The waiting requests. Its caller holds a lock, which `then` may take again."""

    def __init__(self, grammars: Grammars | None, live: RequestRegistry) -> None:
        self._grammars = grammars
        self._pending: dict[str, PendingBatch] = {}  # by request id
        self.live = live

    def __len__(self) -> int:
        return len(self._pending)

    def wait_for_grammars(
        self, requests: Sequence[Request], on_compiled: Callable[[list[str]], object]
    ) -> bool:
        """Returns whether requests that enter together have to wait; then `on_compiled`
        is called with their ids, by any thread.
        """
        if self._grammars is None:
            return False
        by_constraint = {
            request.sampling.structured_outputs: request for request in requests
        }
        compilations = [
            self._grammars.begin(constraint, request.client)
            for constraint, request in by_constraint.items()
            if constraint is not None
        ]
        unfinished = tuple(
            compilation for compilation in compilations if not compilation.done()
        )
        if not unfinished:
            return False
        pending = PendingBatch(tuple(requests), unfinished)
        for request in requests:
            self._pending[request.id] = pending
            self.live[request.id].stage = RequestStage.COMPILING
        _when_all_done(
            unfinished, lambda: on_compiled([request.id for request in pending.batch])
        )
        return True

    def release(self, ids: Iterable[str]) -> list[Requests]:
        """Returns the whole batches of these requests, which wait no more."""
        batches = []
        for name in ids:
            if (pending := self._pending.get(name)) is not None:
                batches.append(pending.batch)
                for request in pending.batch:
                    del self._pending[request.id]
                    self.live[request.id].stage = RequestStage.SUBMITTED
                for compilation in pending.begun:
                    compilation.cancel()  # unless it is done
        return batches


def _when_all_done(
    compilations: Sequence[Compilation], on_done: Callable[[], object]
) -> None:
    """Call `on_done` once, when all are done or cancelled."""
    num_pending = len(compilations)
    lock = threading.Lock()

    def note_done(_: Compilation) -> None:
        nonlocal num_pending
        with lock:
            num_pending -= 1
            is_last = not num_pending
        if is_last:
            on_done()

    for compilation in compilations:
        compilation.add_done_callback(note_done)

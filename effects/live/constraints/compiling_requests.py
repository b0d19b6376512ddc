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
        self, requests: Sequence[Request], then: Callable[[list[str]], object]
    ) -> bool:
        """Returns whether requests that enter together have to wait; then `then` is
        called with their ids, by any thread.
        """
        if self._grammars is None:
            return False
        by_constraint = {
            request.sampling.structured_outputs: request for request in requests
        }
        begun = [
            self._grammars.begin(one, request.client)
            for one, request in by_constraint.items()
            if one is not None
        ]
        unfinished = tuple(one for one in begun if not one.done())
        if not unfinished:
            return False
        pending = PendingBatch(tuple(requests), unfinished)
        for request in requests:
            self._pending[request.id] = pending
            self.live[request.id].stage = RequestStage.COMPILING
        _when_all_done(unfinished, lambda: then([one.id for one in pending.batch]))
        return True

    def release(self, ids: Iterable[str]) -> list[Requests]:
        """Returns the whole batches of these requests, which wait no more."""
        found = []
        for name in ids:
            if (pending := self._pending.get(name)) is not None:
                found.append(pending.batch)
                for request in pending.batch:
                    del self._pending[request.id]
                    self.live[request.id].stage = RequestStage.SUBMITTED
                for one in pending.begun:
                    one.cancel()  # unless it is done
        return found


def _when_all_done(begun: Sequence[Compilation], then: Callable[[], object]) -> None:
    """Call `then` once, when all are done or cancelled."""
    left = len(begun)
    lock = threading.Lock()

    def note_done(_: Compilation) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = not left
        if last:
            then()

    for one in begun:
        one.add_done_callback(note_done)

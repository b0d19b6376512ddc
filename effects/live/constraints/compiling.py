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

from minfer.effects.text.grammars.protocol import Grammar
from minfer.effects.text.grammars.store import Grammars
from minfer.records.request import Request

Batch = tuple[Request, ...]
Begun = Future[Grammar]


@frozen(eq=False)
class Held:
    """Waiting requests, and the grammars that they wait for."""

    batch: Batch
    begun: tuple[Begun, ...]


class Compiling:
    """The waiting requests. Its caller holds a lock, which `then` may take again."""

    def __init__(self, grammars: Grammars | None) -> None:
        self._grammars = grammars
        self._held: dict[str, Held] = {}  # by the id of each request in it

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, name: str) -> bool:
        """Returns whether a request waits."""
        return name in self._held

    def hold(
        self, requests: Sequence[Request], then: Callable[[list[str]], object]
    ) -> bool:
        """Returns whether requests that enter together have to wait; then `then` is
        called with their ids, by any thread.
        """
        if self._grammars is None:
            return False
        asked = {request.sampling.structured_outputs: request for request in requests}
        begun = [
            self._grammars.begin(one, request.client)
            for one, request in asked.items()
            if one is not None
        ]
        open_ones = tuple(one for one in begun if not one.done())
        if not open_ones:
            return False
        held = Held(tuple(requests), open_ones)
        self._held.update((request.id, held) for request in requests)
        _when_all_done(open_ones, lambda: then([one.id for one in held.batch]))
        return True

    def release(self, ids: Iterable[str]) -> list[Batch]:
        """Returns the whole batches of these requests, which wait no more."""
        found = []
        for name in ids:
            if (held := self._held.get(name)) is not None:
                found.append(held.batch)
                for request in held.batch:
                    del self._held[request.id]
                for one in held.begun:
                    one.cancel()  # unless it is done
        return found


def _when_all_done(begun: Sequence[Begun], then: Callable[[], object]) -> None:
    """Call `then` once, when all are done or cancelled."""
    left = len(begun)
    lock = threading.Lock()

    def one_done(_: Begun) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = not left
        if last:
            then()

    for one in begun:
        one.add_done_callback(one_done)

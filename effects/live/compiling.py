"""Requests whose grammars are being compiled: they come in line once that is done.

Compiling takes from a millisecond to a second. Meanwhile the engine knows nothing of such
a request, so its neighbours' steps do not wait; clients take turns (`store.py`). Whoever
was to be cancelled is let in at once, to be told so as ever, and what it waited for is
not compiled, unless others wait for it too. What cannot be compiled is let in, too: it
ends by name when its first mask is due.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

from attrs import frozen

from minfer.effects.text.grammars.protocol import Grammar
from minfer.effects.text.grammars.store import Grammars
from minfer.request import Request

Batch = tuple[Request, ...]
Begun = Future[Grammar]


@frozen(eq=False)
class Held:
    """Requests that wait, and what for."""

    batch: Batch
    begun: tuple[Begun, ...]


class Compiling:
    """Who waits. Its caller holds a lock, which `then` may take again."""

    def __init__(self, grammars: Grammars | None) -> None:
        self._grammars = grammars
        self._held: dict[str, Held] = {}  # by the id of each in it

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, name: str) -> bool:
        """Whether a request waits."""
        return name in self._held

    def hold(
        self, requests: Sequence[Request], then: Callable[[list[str]], object]
    ) -> bool:
        """Whether requests that are to come in together have to wait; then `then` is
        called with their ids, by whatever thread.
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
        """The batches that these requests are in, whole: they wait no more."""
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
    """Call `then` once, when all are done, or were left."""
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

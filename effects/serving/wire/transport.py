"""The protocol of transports: they receive one request, and send events.

A protocol makes events, a transport frames them: as the one body of a response
(`plain`), as server-sent events (`sse`). A `Connection` is the origin of a request; it
opens the transport of the answer. Another kind of connection is another module with a
`RouteMaker`, and a row in `endpoints.py`.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NoReturn, Protocol

from attrs import frozen
from starlette.routing import BaseRoute
from starlette.types import Scope


@frozen
class StreamEvent:
    """One event of a protocol."""

    data: str  # JSON as a rule, in one line
    name: str = ""  # its kind, where a protocol names its events
    # Whether it marks the end, which a transport may show by itself.
    mark: bool = False


@frozen
class Failure:
    """An error in place of an answer, or of the rest of one."""

    status: int  # one of HTTP's
    event: StreamEvent
    retry_after: int | None = None  # seconds


class Transport(Protocol):
    """The channel of one answer to its client."""

    async def write(self, events: Iterable[StreamEvent], *, last: bool) -> None:
        """Send events, in one piece; `last` ends the answer. Waits for a slow client."""

    async def fail(self, failure: Failure) -> None:
        """Send a failure, which ends the answer."""


Watcher = Callable[[bytes], None]  # of the parts of a body


def ignore_part(_: bytes) -> None:
    """Ignore a part."""


class Connection(Protocol):
    """A client with one request, which waits for the answer."""

    @property
    def scope(self) -> Scope:
        """Its address and head, in ASGI's form."""

    @property
    def chosen_id(self) -> str:
        """The x-request-id that the client chose, or an empty string."""

    def announced_size(self, max_bytes: int) -> int:
        """Bytes of the request's body, as far as known before it is read; `max_bytes`, if
        unknown.
        """

    async def read(self, max_bytes: int, watch: Watcher) -> bytes:
        """The request's body, of at most `max_bytes` bytes; `watch` gets each part as it
        comes. Raises ApiError, the errors of `watch`, and ClientDisconnect.
        """

    async def wait_for_disconnect(self) -> NoReturn:
        """Wait until the client disconnects. Raises ClientDisconnect then."""

    async def refuse(self, failure: Failure) -> None:
        """Send a failure as the whole answer."""

    def transport(
        self, *, stream: bool, name: str, ignored: Sequence[str] = ()
    ) -> Transport:
        """The transport of the answer with the id `name`; `ignored` are the fields of the
        request that had no effect.
        """


Handler = Callable[[Connection], Awaitable[None]]
# Makes a route of a path and its handler.
RouteMaker = Callable[[str, Handler], BaseRoute]

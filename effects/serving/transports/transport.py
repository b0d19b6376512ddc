"""What a transport is: it brings one request in, and carries events out.

A protocol makes events, a transport frames them: as the one body of a response
(`plain`), as server-sent events (`sse`). A `Connection` is where a request came from; it
opens the transport on which the answer goes back. One more kind of connection is one more
module with a `RouteMaker`, and a row in `endpoints.py`.
"""

from collections.abc import Awaitable, Callable, Iterable
from typing import NoReturn, Protocol

from attrs import frozen
from starlette.routing import BaseRoute
from starlette.types import Scope


@frozen
class Event:
    """Something that a protocol says at once."""

    data: str  # JSON as a rule, in one line
    name: str = ""  # its kind, where a protocol names its events
    mark: bool = (
        False  # it says that there are no more, which a transport may know itself
    )


@frozen
class Failure:
    """What is said instead of an answer, or of the rest of one."""

    status: int  # one of HTTP's
    event: Event
    retry_after: int | None = None  # seconds


class Transport(Protocol):
    """The way of one answer to its client."""

    async def write(self, events: Iterable[Event], *, last: bool) -> None:
        """Send events, in one piece; `last` ends the answer. Waits for a slow client."""

    async def fail(self, failure: Failure) -> None:
        """Send a failure, which ends the answer."""


Watcher = Callable[[bytes], None]  # of the parts of a body


def see_nothing(_: bytes) -> None:
    """Let a part pass."""


class Connection(Protocol):
    """A client that asks for one thing, and waits for the answer."""

    @property
    def scope(self) -> Scope:
        """Where it came from, and its head, as ASGI has them."""

    @property
    def chosen(self) -> str:
        """The x-request-id that the client chose, or nothing."""

    def announced(self, most: int) -> int:
        """Bytes of the request's body, as far as is known before it is read; `most`, if
        nothing is.
        """

    async def read(self, most: int, see: Watcher) -> bytes:
        """The request's body, of `most` bytes; `see` gets it part by part, as it comes.
        Raises ApiError, what `see` raises, and ClientDisconnect.
        """

    async def departed(self) -> NoReturn:
        """Wait until the client goes away. Raises ClientDisconnect then."""

    async def refuse(self, failure: Failure) -> None:
        """Send a failure as the whole answer."""

    def transport(self, *, stream: bool, name: str) -> Transport:
        """The way back, of the answer with the id `name`."""


Handler = Callable[[Connection], Awaitable[None]]
RouteMaker = Callable[
    [str, Handler], BaseRoute
]  # a path, and what serves who comes there

"""What answers over HTTP have in common: a head, parts of one body, failures."""

from collections.abc import Iterable
from typing import ClassVar, Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minfer.effects.serving.transports.transport import Event, Failure

_NO_KEY: Final = 401


def failure_response(failure: Failure) -> Response:
    """A failure as a whole response."""
    headers: dict[str, str] = {}
    if failure.retry_after is not None:
        headers["Retry-After"] = str(failure.retry_after)
    if failure.status == _NO_KEY:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(
        failure.event.data, failure.status, headers, media_type="application/json"
    )


class HttpTransport:
    """The body of a response, in parts.

    The head goes out with the first one: until then, a failure can be a response of its
    own, with a status.
    """

    content_type: ClassVar[bytes]

    def __init__(self, scope: Scope, receive: Receive, send: Send, name: str) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._name = name
        self._begun = False  # the head was sent

    @staticmethod
    def frame(events: Iterable[Event]) -> str:
        """Events as text of the body."""
        raise NotImplementedError

    async def write(self, events: Iterable[Event], *, last: bool) -> None:
        """Send events as one part of the body."""
        part = self.frame(events).encode()
        if not self._begun:
            head = [
                (b"content-type", self.content_type),
                (b"x-request-id", self._name.encode()),
            ]
            start = {"type": "http.response.start", "status": 200, "headers": head}
            await self._send(start)
            self._begun = True
        await self._send(
            {"type": "http.response.body", "body": part, "more_body": not last}
        )

    async def fail(self, failure: Failure) -> None:
        """Send a failure as a response, or as the last part of the one that was begun."""
        if self._begun:
            await self.write((failure.event,), last=True)
        else:
            response = failure_response(failure)
            await response(self._scope, self._receive, self._send)

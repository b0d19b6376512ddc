"""The common parts of answers over HTTP: a head, parts of one body, failures."""

from collections.abc import Iterable, Sequence
from typing import ClassVar, Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minfer.effects.serving.wire.transport import Failure, StreamEvent

_ID: Final = "x-request-id"
_IGNORED: Final = "x-minfer-ignored"
_JSON: Final = "application/json"
_NO_KEY: Final = 401


def failure_response(
    failure: Failure, name: str = "", ignored: Sequence[str] = ()
) -> Response:
    """A failure as a whole response, of the answer with the id `name`; `ignored` are the
    fields of its request that had no effect.
    """
    retry_after = failure.retry_after
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    if failure.status == _NO_KEY:
        headers["WWW-Authenticate"] = "Bearer"
    if name:
        headers[_ID] = name
    if ignored:
        headers[_IGNORED] = ", ".join(ignored)
    return Response(failure.event.data, failure.status, headers, _JSON)


class HttpTransport:
    """The body of a response, in parts.

    The head is sent with the first one: until then, a failure can be a response of its
    own, with a status.
    """

    content_type: ClassVar[bytes]
    headers: ClassVar[tuple[tuple[bytes, bytes], ...]] = ()  # more of them

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        name: str,
        ignored: Sequence[str] = (),
    ) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._name = name
        self._ignored = ignored
        self._begun = False  # the head was sent

    @staticmethod
    def frame(events: Iterable[StreamEvent]) -> str:
        """Events as text of the body."""
        raise NotImplementedError

    async def write(self, events: Iterable[StreamEvent], *, last: bool) -> None:
        """Send events as one part of the body."""
        body = self.frame(events).encode()
        if not self._begun:
            head = [(b"content-type", self.content_type), *self.headers]
            if self._name:
                head.append((_ID.encode(), self._name.encode()))
            if self._ignored:
                head.append((_IGNORED.encode(), ", ".join(self._ignored).encode()))
            start = {"type": "http.response.start", "status": 200, "headers": head}
            await self._send(start)
            self._begun = True
        await self._send(
            {"type": "http.response.body", "body": body, "more_body": not last}
        )

    async def fail(self, failure: Failure) -> None:
        """Send a failure as a response, or as the last part of one that has begun."""
        if self._begun:
            await self.write((failure.event,), last=True)
        else:
            response = failure_response(failure, self._name, self._ignored)
            await response(self._scope, self._receive, self._send)

"""Sends a request to a backend, and passes its response on as it comes.

request --> head .... none came: BackendFailure, another backend may be tried
             |
           429 or 503 with Retry-After: BackendRefusal, likewise
             |
           (until here, `give_up` ends the attempt: BackendFailure, likewise)
             |
           first part of the body ... none came, as the connection broke: BackendFailure
             |
           the client gets head and parts; a break from here on ends its stream with
           an error in its API's form, or, of a whole body, its connection

A backend has `REFUSAL_SECONDS` for the body of a refusal, and `ERROR_SECONDS` for that of
another error, and both are bounded in size.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable
from typing import ClassVar, Final

import aiohttp
from attrs import define, field, frozen
from multidict import CIMultiDict
from starlette.types import Scope, Send
from yarl import URL

from minfer.effects.proxy.backend_response import BackendResponse
from minfer.effects.proxy.bounded_read import read_at_most
from minfer.effects.proxy.head import (
    RawHeaders,
    broken_header,
    request_headers,
    response_headers,
)
from minfer.effects.serving.application import error_format
from minfer.effects.serving.client_errors import OVERLOADED, ApiError
from minfer.effects.serving.wire.sse import EventStream

CONNECT_SECONDS: Final = 5.0  # until a backend has accepted a connection
KEEPALIVE_SECONDS: Final = 2.0  # of an idle connection; uvicorn closes it after 5
RETRY_STATUSES: Final = frozenset({429, 503})  # another backend may take it
_VALID_STATUSES: Final = range(200, 600)  # of answers to a request that is no upgrade
BAD_GATEWAY: Final = 502
TIMED_OUT: Final = 504
# Causes of failures, for metrics.
CONNECT_FAILED: Final = "connect"  # no connection was made
DISCONNECTED: Final = "disconnect"  # the connection ended
SILENT: Final = "silent"  # the backend does not answer, not even for its health
_MAX_HEADER_BYTES: Final = 2**16  # of a response
_RETRY_AFTER: Final = b"retry-after"
MAX_REFUSAL_BYTES: Final = 2**16  # of a refusal's body
REFUSAL_SECONDS: Final = 5.0
MAX_ERROR_BYTES: Final = 2**20  # of the body of another error
ERROR_SECONDS: Final = 60.0
FIRST_ERROR_STATUS: Final = 400
_EVENT_STREAM: Final = b"text/event-stream"
# aiohttp writes these by itself, where a client has none.
_AUTOMATIC_HEADERS: Final = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
_CONNECT_ERRORS: Final = (aiohttp.ConnectionTimeoutError,)
_log: Final = logging.getLogger("minfer.router")


@frozen(kw_only=True)
class ClientRequest:
    """A client's request, read."""

    scope: Scope
    send: Send
    body: bytes


@frozen
class BackendRefusal:
    """A backend refused a request (429 or 503 with Retry-After): its response."""

    cause: ClassVar[str] = "refused"  # for metrics
    name: str  # of the backend
    status: int
    headers: RawHeaders
    body: bytes


@frozen
class BackendFailure:
    """A backend failed before the first part of a body came."""

    cause: str  # a word, for metrics
    error: ApiError
    refused: bool = False  # it refused the connection
    may_retry: bool = True  # another backend may be tried


@frozen
class Answered:
    """The client has a response, whole or in part."""

    broken: bool = False


Outcome = Answered | BackendRefusal | BackendFailure
# Takes status and head of a response, and the first part of its body.
NoteFirst = Callable[[int, RawHeaders, bytes], None]


@define(eq=False)
class ForwardingAttempt:
    """One attempt to have a request answered by a backend."""

    http: aiohttp.ClientSession
    request: ClientRequest
    name: str  # the backend's base URL
    timeout: float  # seconds for the head of a response, and for each next part
    # Returns whether another backend may be tried if this one does not answer.
    may_move: Callable[[], bool] = field(default=lambda: False)
    started: bool = field(default=False, init=False)  # the client got a part
    _given_up: bool = field(default=False, init=False)
    _timeout: asyncio.Timeout = field(factory=lambda: asyncio.timeout(None), init=False)
    _deadline: float = field(default=math.inf, init=False)  # of the whole response
    _is_event_stream: bool = field(default=False, init=False)  # it may end with an event
    _last_bytes: bytes = field(default=b"", init=False)  # the last two that were sent

    async def run(self, note_first: NoteFirst, *, may_refuse: bool) -> Outcome:
        """Send the request and pass the response on. `note_first` is called with its head
        and first part; a refusal is returned, not passed on, where it `may_refuse`.
        """
        try:
            async with self._timeout:
                return await self._run(note_first, may_refuse=may_refuse)
        except aiohttp.ClientConnectorError as error:
            return self._failed(CONNECT_FAILED, error, refused=True)
        except TimeoutError as error:  # aiohttp's are, too
            if not self.started:
                message = "the server behind the router did not answer in time"
                timeout_error = ApiError(message, None, "backend_timeout", TIMED_OUT)
                if self._given_up:
                    return BackendFailure(SILENT, timeout_error)
                return BackendFailure(
                    "timeout", timeout_error, may_retry=isinstance(error, _CONNECT_ERRORS)
                )
            return await self._break_off(error)
        except (aiohttp.ClientError, OSError) as error:
            if not self.started:
                return self._failed(DISCONNECTED, error)
            return await self._break_off(error)

    def give_up(self) -> None:
        """End the attempt and close its connection, as the backend does not answer: only
        if the client got no part of the answer, and another backend may be tried.
        """
        if self.started or self._given_up or self._timeout.expired():
            return
        if self.may_move():
            self._given_up = True
            self._timeout.reschedule(asyncio.get_running_loop().time())

    async def _run(self, note_first: NoteFirst, *, may_refuse: bool) -> Outcome:
        scope, send = self.request.scope, self.request.send
        path_url = self.name + scope["raw_path"].decode("ascii", "replace")
        query: bytes = scope["query_string"]
        url = URL(
            f"{path_url}?{query.decode('latin-1')}" if query else path_url, encoded=True
        )
        pending_response = self.http.request(
            scope["method"],
            url,
            data=self.request.body or None,
            headers=CIMultiDict(request_headers(scope)),
            skip_auto_headers=_AUTOMATIC_HEADERS,
            allow_redirects=False,
        )
        loop = asyncio.get_running_loop()
        self._end_at(loop.time() + self.timeout)
        async with pending_response as response:
            headers = response_headers(response.raw_headers)
            _check_head(response.status, headers)
            if may_refuse and _is_refusal(response.status, headers):
                self._end_at(math.inf)
                return await self._read_refusal(response, headers)
            if response.status >= FIRST_ERROR_STATUS:
                self._deadline = loop.time() + ERROR_SECONDS
            first_chunk = await self._next_chunk(response.content)
            self._is_event_stream = _takes_another_event(headers)
            note_first(response.status, headers, first_chunk)
            self.started = True
            self._end_at(self._deadline)  # it is too late to give up
            await send(
                {
                    "type": "http.response.start",
                    "status": response.status,
                    "headers": headers,
                }
            )
            await self._pass_on_body(response, first_chunk)
        return Answered()

    async def _pass_on_body(self, response: aiohttp.ClientResponse, chunk: bytes) -> None:
        """Send the client a body that begins with `chunk`, as it comes."""
        content, send = response.content, self.request.send
        bytes_left = MAX_ERROR_BYTES if response.status >= FIRST_ERROR_STATUS else None
        more_body = True
        while chunk and more_body:
            if bytes_left is not None:
                bytes_left -= len(chunk)
                if bytes_left < 0:
                    message = f"an error's body has more than {MAX_ERROR_BYTES} bytes"
                    raise aiohttp.ClientPayloadError(message)
            self._last_bytes = chunk[-2:]
            more_body = not content.at_eof()  # the last part carries the end of the body
            await send(
                {"type": "http.response.body", "body": chunk, "more_body": more_body}
            )
            chunk = await self._next_chunk(content) if more_body else b""
        if more_body:
            await send({"type": "http.response.body"})

    async def _next_chunk(self, content: aiohttp.StreamReader) -> bytes:
        """The next part of a body. aiohttp's own read timeout is not used: it does not
        run after interim responses, and bytes that complete no part restart it.
        """
        now = asyncio.get_running_loop().time()
        self._end_at(min(now + self.timeout, self._deadline))
        chunk = await content.readany()
        self._end_at(self._deadline)
        return chunk

    def _end_at(self, time: float) -> None:
        """Set the time at which the attempt ends, unless it was given up."""
        if self.started or not self._given_up:
            self._timeout.reschedule(None if time == math.inf else time)

    async def _read_refusal(
        self, response: aiohttp.ClientResponse, headers: RawHeaders
    ) -> BackendRefusal:
        """A refusal with its body, or the router's own, if that is late or too large."""
        body = None
        with contextlib.suppress(aiohttp.ClientError, OSError):  # also TimeoutError
            async with asyncio.timeout(REFUSAL_SECONDS):
                body = await read_at_most(response.content, MAX_REFUSAL_BYTES)
        if body is not None:
            return BackendRefusal(self.name, response.status, headers, body)
        message = "the server behind the router takes no requests now"
        error = ApiError(message, None, OVERLOADED, response.status)
        body = error_format(self.request.scope)(error).event.data.encode()
        retry_headers = [header for header in headers if header[0] == _RETRY_AFTER]
        content_type = (b"content-type", b"application/json")
        return BackendRefusal(
            self.name, response.status, [content_type, *retry_headers], body
        )

    def _failed(
        self, cause: str, error: Exception, *, refused: bool = False
    ) -> BackendFailure:
        _log.warning("%s failed: %s", self.name, _describe_error(error))
        message = (
            "the server behind the router cannot be reached, or closed the connection"
        )
        failure = ApiError(message, None, "backend_failed", BAD_GATEWAY)
        return BackendFailure(cause, failure, refused)

    async def _break_off(self, error: Exception) -> Answered:
        """End a response that its backend does not end."""
        _log.warning("%s broke off: %s", self.name, _describe_error(error))
        if self._is_event_stream:
            message = "the server behind the router broke off"
            failure = ApiError(message, None, "backend_failed", BAD_GATEWAY)
            event = error_format(self.request.scope)(failure).event
            end = b"" if self._last_bytes == b"\n\n" else b"\n\n"
            body = end + EventStream.frame([event]).encode()
            await self.request.send({"type": "http.response.body", "body": body})
        # Without an end, uvicorn closes the connection: the client sees that it is cut.
        return Answered(broken=True)


def _describe_error(error: Exception) -> str:
    """What went wrong, in a line for the log, without the request's query and what the
    backend wrote: there may be secrets in these.
    """
    text = str(error)
    if isinstance(error, aiohttp.ClientResponseError):
        text = error.message.partition(":")[0]  # what it read follows
    elif isinstance(error, aiohttp.ServerDisconnectedError):
        text = "Server disconnected"  # its message may be the beginning of a head
    return text.partition("\n")[0] or type(error).__name__


def _takes_another_event(headers: RawHeaders) -> bool:
    """Whether a response is a stream of events to which an event can be appended: without
    a Content-Length, and not compressed.
    """
    if any(name in (b"content-length", b"content-encoding") for name, _ in headers):
        return False
    return any(
        name == b"content-type" and value.lower().startswith(_EVENT_STREAM)
        for name, value in headers
    )


def _check_head(status: int, headers: RawHeaders) -> None:
    """Raise ClientPayloadError for a head that no client can be sent."""
    if status not in _VALID_STATUSES:
        raise aiohttp.ClientPayloadError(f"it answered with status {status}")
    if name := broken_header(headers):
        raise aiohttp.ClientPayloadError(f"it answered with a broken header {name}")


def _is_refusal(status: int, headers: RawHeaders) -> bool:
    return status in RETRY_STATUSES and any(name == _RETRY_AFTER for name, _ in headers)


async def pass_on(refused: BackendRefusal, send: Send) -> None:
    """Pass a refusal on to the client."""
    head = [(name, value) for name, value in refused.headers if name != b"content-length"]
    length = (b"content-length", str(len(refused.body)).encode())
    await send(
        {
            "type": "http.response.start",
            "status": refused.status,
            "headers": [*head, length],
        }
    )
    await send({"type": "http.response.body", "body": refused.body})


def open_session() -> aiohttp.ClientSession:
    """The client of all backends. Its requests need time limits of their own."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        max_line_size=_MAX_HEADER_BYTES,
        max_field_size=_MAX_HEADER_BYTES,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        response_class=BackendResponse,
    )

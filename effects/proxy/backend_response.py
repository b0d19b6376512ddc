"""A response of a backend, with two checks that aiohttp's response lacks.

- Interim responses (1xx) before it: aiohttp skips any number of them, and reads a flood
  of them without a pause in which other tasks run.
- The end of the connection ends the body. aiohttp closes the connection when a body
  becomes invalid HTTP, but does not report that to the body's reader.
"""

import asyncio
from typing import Any, Final

import aiohttp
from aiohttp.connector import Connection

MAX_INTERIM: Final = 100  # interim responses before a response


class BackendResponse(aiohttp.ClientResponse):
    """A response, for `aiohttp.ClientSession(response_class=...)`."""

    async def start(self, connection: Connection) -> aiohttp.ClientResponse:
        """Read the head. Raises aiohttp.ClientError."""
        protocol = connection.protocol
        if protocol is None:
            raise aiohttp.ServerDisconnectedError
        read, interim_left = protocol.read, MAX_INTERIM + 1

        async def read_bounded() -> Any:
            nonlocal interim_left
            interim_left -= 1
            if interim_left < 0:
                message = f"it sent more than {MAX_INTERIM} interim responses (1xx)"
                raise aiohttp.ClientPayloadError(message)
            return await read()

        # `ClientResponse.start` has no other place where these can be counted.
        protocol.read = read_bounded  # type: ignore[method-assign]
        try:
            await super().start(connection)
        finally:
            del protocol.read
        closed = protocol.closed
        if closed is not None:

            def forget() -> None:
                closed.remove_done_callback(self._note_closed)

            closed.add_done_callback(self._note_closed)
            # The connection may serve many responses after this one.
            self.content.on_eof(forget)
        return self

    def _note_closed(self, closed: "asyncio.Future[None]") -> None:
        if not closed.cancelled():
            closed.exception()  # else asyncio logs that it was never retrieved
        if not self.content.is_eof() and self.content.exception() is None:
            message = "the body breaks off, or is no HTTP from some byte on"
            self.content.set_exception(aiohttp.ClientPayloadError(message))

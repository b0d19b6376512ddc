"""Ends the work for a client when it leaves."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Receive


async def until_disconnect(answer: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Run `answer`, whose request was received whole; cancel it when the client leaves.
    Raises its errors, and ClientDisconnect.
    """
    answering = asyncio.create_task(answer)
    watching = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((answering, watching), return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise ClientDisconnect
        answering.result()
    finally:
        watching.cancel()
        if not answering.done():
            answering.cancel()
            await asyncio.wait((answering,))


async def _disconnect(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass

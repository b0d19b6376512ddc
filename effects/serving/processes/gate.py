"""The application while the model is loading: every request is answered at once with the
loading state, and the status 503; `/health` with 200, as the process works as it should.
"""

from collections.abc import Callable
from typing import Final

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocketClose

from minfer.effects.serving.application import Application, refusal
from minfer.effects.serving.client_errors import ApiError
from minfer.effects.serving.wire.connections import LIVENESS_PATHS

_TRY_AGAIN_LATER: Final = 1013  # a WebSocket's close code


class Gate:
    """An ASGI application in front of another one, which is set later."""

    def __init__(self, unready: Callable[[], str]) -> None:
        """`unready` returns what the server waits for."""
        self.application: Application | None = None
        self._unready = unready

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or answer that it comes too early."""
        if self.application is not None:
            await self.application(scope, receive, send)
        elif scope["type"] == "http":
            await self._not_ready(scope)(scope, receive, send)
        else:
            await WebSocketClose(_TRY_AGAIN_LATER)(scope, receive, send)

    def _not_ready(self, scope: Scope) -> Response:
        path = scope["path"]
        reason = self._unready() or "starting"
        if path in LIVENESS_PATHS:  # the process lives, and works as it should
            return JSONResponse({"status": f"loading: {reason}"})
        if path == "/ready":
            return JSONResponse({"status": reason}, 503)
        message = f"the server is not ready: {reason}"
        return refusal(ApiError(message, code="overloaded", status=503), scope)

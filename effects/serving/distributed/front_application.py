"""The ASGI application of the Ray Serve ingress: it reads the whole request, and passes
it to an engine (`serve_engine`).
"""

from typing import Any, Final

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from minfer.effects.serving.application import refusal
from minfer.effects.serving.client_errors import OVERLOADED, ApiError
from minfer.effects.serving.distributed.asgi_calls import head_of
from minfer.effects.serving.router.body import Bodies
from minfer.effects.serving.router.disconnects import until_disconnect
from minfer.effects.serving.router.homes import Homes
from minfer.effects.serving.router.paths import Target, Way, target_of
from minfer.effects.serving.wire.connections import LIVE
from minfer.effects.serving.wire.request_ids import HEADER
from minfer.values.texts import without_breaks

_UNAVAILABLE: Final = 503
# Engines that may die with a request before it is refused: the request may be the cause.
_MOST_ENDED: Final = 2


class FrontApplication:
    """The endpoints that `minfer route` passes on. `engines`: a handle to the deployment
    of engines; `most`: most bytes of a body.
    """

    def __init__(self, engines: Any, most: int) -> None:
        self._engines = engines.options(method_name="http", stream=True)
        self._bodies = Bodies(most)
        self._homes = Homes()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        match scope["type"]:
            case "lifespan":
                for what in ("startup", "shutdown"):
                    await receive()
                    await send({"type": f"lifespan.{what}.complete"})
            case "websocket":
                await WebSocketClose()(scope, receive, send)
            case _:
                await self._serve({**scope, **head_of(scope)}, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in (*LIVE, "/ready"):
            await JSONResponse({"status": "ok"})(scope, receive, send)
            return
        try:
            target = target_of(scope["method"], scope["path"], scope["raw_path"])
            body = await self._bodies.read(scope, receive)
            try:
                await until_disconnect(self._pass_on(target, scope, body, send), receive)
            finally:
                self._bodies.release(body)
        except ClientDisconnect:
            return
        except ApiError as error:
            await refusal(error, scope)(scope, receive, send)

    async def _pass_on(
        self, target: Target, scope: Scope, body: bytes, send: Send
    ) -> None:
        """Have an engine answer, or another one if that dies before its answer begins.
        Raises ApiError.
        """
        home = self._homes.find(target.id) if target.way is Way.HOME else None
        for _ in range(_MOST_ENDED):
            answer = _Answer(send, self._homes)
            replies = self._engines.remote(head_of(scope), body, home or "")
            try:
                async for each in replies:
                    await answer.take(each)
            except BackPressureError as error:  # more wait than max_queued_requests
                raise ApiError(
                    without_breaks(error), None, OVERLOADED, _UNAVAILABLE
                ) from None
            except RayActorError:
                if answer.begun:
                    raise
            else:
                return
            finally:
                if not answer.ended:
                    replies.cancel()
        why = "the engine that had this request has ended; try again later"
        raise ApiError(why, None, "no_backend", _UNAVAILABLE, 1)


class _Answer:
    """An answer on its way to the client. `begun`: the client has a part of it; `ended`:
    the client has all of it.
    """

    def __init__(self, send: Send, homes: Homes) -> None:
        self._send = send
        self._homes = homes
        self._replica = ""
        self._head: list[tuple[bytes, bytes]] | None = None  # headers, until a body comes
        self.begun = self.ended = False

    async def take(self, each: str | list[Message]) -> None:
        """Take what a replica yields: first its name, then ASGI messages to pass on."""
        if isinstance(each, str):
            self._replica = each
            return
        for message in each:
            if message["type"] == "http.response.start":
                self._head = [*message.get("headers", ())]
                # Ray Serve's proxy adds a request id of its own to requests and answers.
                message["headers"] = [one for one in self._head if one[0] != HEADER]
            elif self._head is not None:
                self._homes.note(self._replica, self._head, message.get("body", b""))
                self._head = None
            self.begun = True
            await self._send(message)
        last = each[-1]
        ends = last["type"] == "http.response.body"
        self.ended = ends and not last.get("more_body", False)

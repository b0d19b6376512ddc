"""The ingress of an application of Ray Serve, for HTTP and for handles.

    client --HTTP--> proxy --> ServedFront --handle, MinferRequestRouter--> ServedEngine
    DeploymentHandle --------------^

The ingress is a deployment of its own because the request router has to see the body. For
a call of a handle, the router has the arguments; for HTTP, the proxy chooses a replica
when it has only the request's head.
"""

import contextlib
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Final

from starlette.types import ASGIApp

from minfer.effects.serving.distributed.asgi_calls import answers, post_head
from minfer.effects.serving.distributed.front_application import FrontApplication

_BAD: Final = 400
_INTERNAL: Final = 500
_DATA: Final = b"data: "
_END: Final = b"[DONE]"


class AnswerError(RuntimeError):
    """The error that answers a call of a handle; `status` is its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message)
        self.status = status
        self.message = message

    def __str__(self) -> str:
        return f"{self.status}: {self.message}"


class ServedFront:
    """The ingress. `engines`: a handle to the engines; `most`: most bytes of a body."""

    def __init__(self, engines: Any, most: int) -> None:
        self._app = FrontApplication(engines, most)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The ASGI application that Ray Serve calls for HTTP requests."""
        return self._app

    async def ask(self, path: str, body: Mapping[str, Any], api_key: str = "") -> Any:
        """POST a JSON body to an endpoint, such as `/v1/chat/completions`; returns the
        JSON of the answer. Raises AnswerError.
        """
        parts = [part async for part in self._parts(path, body, api_key)]
        return json.loads(b"".join(parts))

    async def stream(
        self, path: str, body: Mapping[str, Any], api_key: str = ""
    ) -> AsyncGenerator[Any]:
        """POST a JSON body with `"stream": true` set; yields the JSON of each event.
        Raises AnswerError, also for an error event within the stream.
        """
        left = b""
        async for part in self._parts(path, {**body, "stream": True}, api_key):
            *lines, left = (left + part).split(b"\n")
            for data in (one.removeprefix(_DATA) for one in lines if _DATA in one[:6]):
                if data == _END:
                    continue
                event = json.loads(data)
                if event.get("error"):
                    raise AnswerError(_INTERNAL, _message_of(event))
                yield event

    async def _parts(
        self, path: str, body: Mapping[str, Any], api_key: str
    ) -> AsyncGenerator[bytes]:
        """The parts of an answer's body. Raises AnswerError."""
        data = json.dumps(body).encode()
        head = post_head(path, len(data), api_key)
        status, refused = 0, b""
        async with contextlib.aclosing(answers(self._app, head, data)) as batches:
            async for batch in batches:
                for message in batch:
                    status = message.get("status", status)
                    if status >= _BAD:
                        refused += message.get("body", b"")
                    else:
                        yield message.get("body", b"")
        if status >= _BAD:
            raise AnswerError(status, _message_of(json.loads(refused)))


def _message_of(answer: Mapping[str, Any]) -> str:
    """The message of an error, as OpenAI and Anthropic write it."""
    error = answer["error"]
    return str(error["message"] if isinstance(error, dict) else error)

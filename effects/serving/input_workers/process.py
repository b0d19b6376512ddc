"""The parent's end of a worker: it starts the process, sends bodies, and ends it."""

import asyncio
import contextlib
import socket
from typing import Final

import msgspec

from minfer.effects.net.child import spawn_child
from minfer.effects.net.framing import FrameReader, frame
from minfer.effects.serving.client_errors import ApiError
from minfer.effects.serving.input_workers.worker_messages import (
    MAX_MESSAGE_BYTES,
    Refusal,
    WorkerReply,
    WorkerRequest,
    WorkResult,
    decode_reply,
    encode,
)

_READ_BYTES: Final = 2**18  # of a message to read at once
MODULE: Final = "minfer.effects.serving.input_workers.worker_main"


class WorkerGoneError(RuntimeError):
    """The worker ended before it replied."""


class Process:
    """One worker. It starts at once, and serves one event loop, one body at a time.

    Its memory is its own: it is a new process, not forked, so it holds nothing of a
    model, a device or a client.
    """

    def __init__(self, facts: object, module: str = "") -> None:
        """`facts`: a record that the worker reads first; `module`: its program."""
        own_end, child_end = socket.socketpair()
        own_end.setblocking(False)
        self._link = own_end
        self._reader = FrameReader(MAX_MESSAGE_BYTES)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        with child_end:
            self._child = spawn_child(
                module or MODULE,
                str(child_end.fileno()),
                stdin_data=msgspec.json.encode(facts),
                descriptors=[child_end.fileno()],
                own_session=True,  # a terminal's interrupt is for the server to handle
            )
        self.spent = False  # it has ended, or is ending

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._child.pid

    async def ready(self) -> None:
        """Wait until the worker is ready. Raises WorkerGoneError."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(sock=self._link)
            await self._reply()

    async def work(self, path: str, data: bytes, tenant: str = "") -> WorkResult:
        """Have a tenant's body that was posted to `path` worked on. Raises ApiError, and
        WorkerGoneError.
        """
        await self.ready()
        reader_writer = self._streams
        assert reader_writer is not None  # noqa: S101 - it is ready
        request = encode(WorkerRequest(path=path, data=data, tenant=tenant))
        reader_writer[1].write(frame(request))
        reply = await self._reply()
        self.spent = reply.last
        result = reply.result
        if result is None:
            raise _to_error(reply.refusal)
        return result

    async def _reply(self) -> WorkerReply:
        assert self._streams is not None  # noqa: S101 - called when connected
        reader, writer = self._streams
        try:
            await writer.drain()
            while data := await reader.read(_READ_BYTES):
                if frames := self._reader.feed(data):
                    return decode_reply(frames[0])  # the only one, as one was requested
        except OSError:
            pass
        self.spent = True
        raise WorkerGoneError("the worker has gone")

    def kill(self) -> None:
        """Kill the worker, in any state. May be called again."""
        self.spent = True
        self._child.kill()
        if self._streams is None:
            self._link.close()
        else:
            # RuntimeError: the event loop is closed, and the socket with it.
            with contextlib.suppress(RuntimeError):
                self._streams[1].close()


def _to_error(refusal: Refusal | None) -> ApiError:
    if refusal is None:
        return ApiError("internal error", status=500)
    return ApiError(refusal.message, refusal.param, refusal.code, refusal.status)

"""The pools: bodies wait in a queue for workers, which are bounded in time and memory.

A worker that takes too long, or has died, is replaced, and its body is refused: the body
may be the cause. When a client disconnects, its body leaves the queue; if a worker is
busy with it, the worker is killed, unless it is done in a moment.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Final

from attrs import define, field, frozen

from minfer.effects.live.errors import EngineDeadError
from minfer.effects.serving.client_errors import SHUTTING_DOWN, ApiError
from minfer.effects.serving.input_workers.process import Process, WorkerGoneError
from minfer.effects.serving.input_workers.task import (
    ModelFacts,
    PreparedRequest,
    QueryResult,
    work,
)
from minfer.effects.serving.input_workers.worker_messages import WorkResult
from minfer.effects.serving.protocol import Endpoint, ModelInfo, QueryEndpoint
from minfer.effects.serving.request_parsing.model_names import Models
from minfer.effects.text.job_queue import JobQueue

WORK_TIMEOUT_SECONDS: Final = 10.0  # that a body may take
START_TIMEOUT_SECONDS: Final = 60.0  # that a worker has to start
GRACE_SECONDS: Final = 0.5  # after which a body is dropped if its client has left
SMALL_BODY_BYTES: Final = 2**16  # of a body for which one worker is reserved
MAX_STARTS: Final = 3  # starts of a worker, before a thread replaces it
_log: Final = logging.getLogger("uvicorn.error")


@frozen(kw_only=True)
class BodyRefusals:
    """The errors for bodies that take too much."""

    too_long: str = "the body takes too long to be read and tokenized; send less at once"
    too_heavy: str = "the body cannot be read and tokenized; send less at once"
    status: int = 413
    param: str | None = None  # the field that is the cause

    def error(self, message: str) -> ApiError:
        """The error with one of these messages."""
        return ApiError(message, self.param, status=self.status)


@define(eq=False)
class _PendingBody:
    """A body to work on, and the future of its waiter."""

    path: str  # that it was posted to
    data: bytes
    in_thread: Callable[[], WorkResult]  # does the work, where there are no workers
    future: asyncio.Future[WorkResult]
    tenant: str = ""


class _RestartingWorker:
    """A worker process, replaced whenever it ends."""

    def __init__(
        self, start: Callable[[], Process], limit: float, refusals: BodyRefusals
    ) -> None:
        self._start = start
        self._limit = limit
        self._refusals = refusals
        self._closed = False
        self.process = start()

    async def prepare(self, body: _PendingBody) -> WorkResult:
        """Work on a body. Raises ApiError, and WorkerGoneError if none can be started."""
        await self._wait_until_ready()
        loop = asyncio.get_running_loop()
        current = self.process

        def kill_soon(future: asyncio.Future[WorkResult]) -> None:
            if future.cancelled():
                timer.append(loop.call_later(GRACE_SECONDS, current.kill))

        timer: list[asyncio.TimerHandle] = []
        body.future.add_done_callback(kill_soon)
        try:
            async with asyncio.timeout(self._limit):
                return await current.work(body.path, body.data, body.tenant)
        except TimeoutError:
            current.kill()
            raise self._refusals.error(self._refusals.too_long) from None
        except WorkerGoneError:
            raise self._refusals.error(self._refusals.too_heavy) from None
        finally:
            body.future.remove_done_callback(kill_soon)
            for handle in timer:
                handle.cancel()
            self._replace_if_spent()

    async def _wait_until_ready(self) -> None:
        """Wait until the worker is ready."""
        for _ in range(MAX_STARTS):
            try:
                async with asyncio.timeout(START_TIMEOUT_SECONDS):
                    await self.process.ready()
            except (WorkerGoneError, TimeoutError):
                self.process.kill()
                self._replace_if_spent()
            else:
                return
        raise WorkerGoneError("no worker can be started")

    def _replace_if_spent(self) -> None:
        if self.process.spent and not self._closed:
            self.process.kill()
            self.process = self._start()

    def close(self) -> None:
        """End the worker, for good."""
        self._closed = True
        self.process.kill()


@define(eq=False)
class _WorkerSlot:
    """A slot that prepares one body at a time, of at most `max_bytes` bytes."""

    input_worker: _RestartingWorker | None  # None: a thread
    max_bytes: int | None = None
    busy: bool = False
    task: "asyncio.Task[None] | None" = field(default=None)


class BodyPool:
    """Works on bodies: in `workers` processes, which `start` starts, or, with 0 of them,
    in `threads`. It belongs to one event loop.
    """

    def __init__(
        self,
        start: Callable[[], Process],
        threads: Executor | None,
        *,
        workers: int = 0,
        limit: float = WORK_TIMEOUT_SECONDS,
        refusals: BodyRefusals = BodyRefusals(),
    ) -> None:
        """Without `threads`, those of the event loop are used."""
        self._queue = JobQueue[_PendingBody]()
        self._threads = threads
        slots = [
            _WorkerSlot(_RestartingWorker(start, limit, refusals)) for _ in range(workers)
        ]
        self._slots = slots or [_WorkerSlot(None), _WorkerSlot(None)]
        if len(self._slots) > 1:
            self._slots[0].max_bytes = SMALL_BODY_BYTES
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """The ids of the processes at present."""
        return [
            slot.input_worker.process.pid for slot in self._slots if slot.input_worker
        ]

    def __len__(self) -> int:
        """The number of waiting bodies."""
        return len(self._queue)

    async def run(
        self,
        path: str,
        data: bytes,
        client: str,
        in_thread: Callable[[], WorkResult],
        size: int | None = None,
        tenant: str = "",
    ) -> WorkResult:
        """What a worker makes of a body that was posted to `path`, at its client's turn,
        or `in_thread`, which does the same. `size`: its bytes, if `data` is compressed.
        `tenant`: whose it is, where templates are kept by tenant.

        Raises ApiError, the errors of `in_thread`, and EngineDeadError once it is closed.
        """
        if self._closed:
            raise EngineDeadError(SHUTTING_DOWN)
        future: asyncio.Future[WorkResult] = asyncio.get_running_loop().create_future()
        body = _PendingBody(path, data, in_thread, future, tenant)
        place = self._queue.add(body, client, len(data) if size is None else size)
        self._dispatch()
        try:
            return await body.future
        finally:
            self._queue.remove(place)

    def close(self) -> None:
        """End all workers, and fail the waiting bodies. May be called again."""
        self._closed = True
        while (body := self._queue.take()) is not None:
            _settle(body, EngineDeadError(SHUTTING_DOWN))
        for slot in self._slots:
            if slot.input_worker is not None:
                slot.input_worker.close()

    def _dispatch(self) -> None:
        """Give waiting bodies to free slots; bounded slots take only small ones."""
        for slot in self._slots:
            if not slot.busy and (body := self._queue.take(slot.max_bytes)) is not None:
                slot.busy = True
                slot.task = asyncio.ensure_future(self._run(slot, body))

    async def _run(self, slot: _WorkerSlot, body: _PendingBody) -> None:
        try:
            _settle(body, await self._prepare(slot, body))
        except Exception as error:
            _settle(body, EngineDeadError(SHUTTING_DOWN) if self._closed else error)
        finally:
            slot.busy = False
            if not self._closed:
                self._dispatch()

    async def _prepare(self, slot: _WorkerSlot, body: _PendingBody) -> WorkResult:
        if slot.input_worker is not None:
            try:
                return await slot.input_worker.prepare(body)
            except WorkerGoneError:
                slot.input_worker.close()
                if self._closed:
                    raise
                _log.exception("bodies are prepared in a thread from now on")
                slot.input_worker = None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, body.in_thread)


class WorkerPool(BodyPool):
    """Prepares requests. `model_info` and `models` are for threads, `facts` for
    processes; both describe the same model.
    """

    def __init__(
        self,
        facts: ModelFacts,
        model_info: ModelInfo,
        models: Models,
        threads: Executor,
        *,
        workers: int = 0,
        limit: float = WORK_TIMEOUT_SECONDS,
        refusals: BodyRefusals = BodyRefusals(),
    ) -> None:
        start = partial(Process, facts)
        super().__init__(start, threads, workers=workers, limit=limit, refusals=refusals)
        self._thread_args = model_info, models

    async def prepare(
        self, endpoint: Endpoint, data: bytes, client: str, tenant: str = ""
    ) -> PreparedRequest:
        """Prepare a tenant's body, at its client's turn.

        Raises ApiError, the errors of `to_api_error`, and EngineDeadError once it is
        closed.
        """
        in_thread = partial(work, endpoint, data, *self._thread_args)
        result = await self.run(endpoint.path, data, client, in_thread, tenant=tenant)
        if not isinstance(result, PreparedRequest):
            raise TypeError(f"{endpoint.path} was answered like a question")
        return result

    async def answer(
        self, query: QueryEndpoint, data: bytes, client: str, tenant: str = ""
    ) -> QueryResult:
        """Answer a question, at its client's turn. Raises likewise."""
        in_thread = partial(work, query, data, *self._thread_args)
        result = await self.run(query.path, data, client, in_thread, tenant=tenant)
        if not isinstance(result, QueryResult):
            raise TypeError(f"{query.path} was prepared like a request")
        return result


def _settle(body: _PendingBody, result: WorkResult | Exception) -> None:
    """Pass the result to the job's waiter, unless it left or the event loop is closed."""
    if body.future.done():
        return
    with contextlib.suppress(RuntimeError):
        if isinstance(result, Exception):
            body.future.set_exception(result)
        else:
            body.future.set_result(result)

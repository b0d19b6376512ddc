"""The pool: bodies wait in a queue for workers, which are bounded in time and memory.

A worker that takes too long, or has died, is replaced, and its body is refused: the body
may be the cause. When a client disconnects, its body leaves the queue; if a worker is
busy with it, the worker is killed, unless it is done in a moment.
"""

import asyncio
import contextlib
import logging
from concurrent.futures import Executor
from typing import Final

from attrs import define, field

from minfer.effects.live.errors import EngineDeadError
from minfer.effects.serving.errors import SHUTTING_DOWN, ApiError
from minfer.effects.serving.input_workers.process import Process, WorkerGoneError
from minfer.effects.serving.input_workers.task import Prepared, Recipe, work
from minfer.effects.serving.protocol import Endpoint, Grounds, Question
from minfer.effects.serving.request_parsing.model_names import Models
from minfer.effects.text.job_queue import JobQueue

LIMIT: Final = 10.0  # seconds that a body may take
BOOT: Final = 60.0  # seconds that a worker has to start
GRACE: Final = 0.5  # seconds after which a body is dropped if its client has left
SMALL: Final = 2**16  # bytes of a body for which one worker is reserved
TRIES: Final = 3  # starts of a worker, before a thread replaces it
TOO_LONG: Final = "the body takes too long to be read and tokenized; send less at once"
TOO_HEAVY: Final = "the body cannot be read and tokenized; send less at once"
_log: Final = logging.getLogger("uvicorn.error")


@define(eq=False)
class _Job:
    """A body to prepare, and the future of its waiter."""

    target: Endpoint | Question
    data: bytes
    done: asyncio.Future[Prepared | str]


class _Threads:
    """Prepares in a thread of this process, where there are no workers."""

    def __init__(self, threads: Executor, grounds: Grounds, models: Models) -> None:
        self._threads = threads
        self._about = grounds, models

    async def prepare(self, job: _Job) -> Prepared | str:
        """Prepare a body. Raises the errors of `work`."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._threads, work, job.target, job.data, *self._about
        )


class _Worker:
    """A worker process, replaced whenever it ends."""

    def __init__(self, recipe: Recipe, limit: float) -> None:
        self._recipe = recipe
        self._limit = limit
        self._closed = False
        self.process = Process(recipe)

    async def prepare(self, job: _Job) -> Prepared | str:
        """Prepare a body. Raises ApiError, and WorkerGoneError if none can be started."""
        await self._started()
        loop = asyncio.get_running_loop()
        current = self.process

        def left(done: asyncio.Future[Prepared | str]) -> None:
            if done.cancelled():
                timer.append(loop.call_later(GRACE, current.kill))

        timer: list[asyncio.TimerHandle] = []
        job.done.add_done_callback(left)
        try:
            async with asyncio.timeout(self._limit):
                return await current.work(job.target, job.data)
        except TimeoutError:
            current.kill()
            raise ApiError(TOO_LONG, status=413) from None
        except WorkerGoneError:
            raise ApiError(TOO_HEAVY, status=413) from None
        finally:
            job.done.remove_done_callback(left)
            for one in timer:
                one.cancel()
            self._renew()

    async def _started(self) -> None:
        """Wait until the worker is ready."""
        for _ in range(TRIES):
            try:
                async with asyncio.timeout(BOOT):
                    await self.process.ready()
            except (WorkerGoneError, TimeoutError):
                self.process.kill()
                self._renew()
            else:
                return
        raise WorkerGoneError("no worker can be started")

    def _renew(self) -> None:
        if self.process.spent and not self._closed:
            self.process.kill()
            self.process = Process(self._recipe)

    def close(self) -> None:
        """End the worker, for good."""
        self._closed = True
        self.process.kill()


@define(eq=False)
class _Slot:
    """A slot that prepares one body at a time; `most`: the largest, in bytes."""

    preparer: _Worker | None  # None: a thread
    most: int | None = None
    busy: bool = False
    task: "asyncio.Task[None] | None" = field(default=None)


class Pool:
    """Prepares bodies: in so many processes, or, with 0 `workers`, in `threads`.

    It belongs to one event loop. `grounds` and `models` are for threads, the recipe for
    processes; both describe the same model.
    """

    def __init__(
        self,
        recipe: Recipe,
        grounds: Grounds,
        models: Models,
        threads: Executor,
        *,
        workers: int = 0,
        limit: float = LIMIT,
    ) -> None:
        self._line = JobQueue[_Job]()
        self._threads = _Threads(threads, grounds, models)
        made = [_Slot(_Worker(recipe, limit)) for _ in range(workers)]
        self._slots = made or [_Slot(None), _Slot(None)]
        if len(self._slots) > 1:
            self._slots[0].most = SMALL
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """The ids of the processes at present."""
        return [slot.preparer.process.pid for slot in self._slots if slot.preparer]

    def __len__(self) -> int:
        """The number of waiting bodies."""
        return len(self._line)

    async def prepare(self, endpoint: Endpoint, data: bytes, client: str) -> Prepared:
        """Prepare a body, at its client's turn.

        Raises ApiError, the errors of `told_of`, and EngineDeadError once it is closed.
        """
        found = await self._done(endpoint, data, client)
        if isinstance(found, str):
            raise TypeError(f"{endpoint.path} was answered like a question")
        return found

    async def answer(self, question: Question, data: bytes, client: str) -> str:
        """Answer a question in JSON, at its client's turn. Raises likewise."""
        found = await self._done(question, data, client)
        if not isinstance(found, str):
            raise TypeError(f"{question.path} was prepared like a request")
        return found

    async def _done(
        self, target: Endpoint | Question, data: bytes, client: str
    ) -> Prepared | str:
        if self._closed:
            raise EngineDeadError(SHUTTING_DOWN)
        job = _Job(target, data, asyncio.get_running_loop().create_future())
        place = self._line.add(job, client, len(data))
        self._dispatch()
        try:
            return await job.done
        finally:
            self._line.remove(place)

    def close(self) -> None:
        """End all workers, and fail the waiting bodies. May be called again."""
        self._closed = True
        while (job := self._line.take()) is not None:
            _settle(job, EngineDeadError(SHUTTING_DOWN))
        for slot in self._slots:
            if slot.preparer is not None:
                slot.preparer.close()

    def _dispatch(self) -> None:
        """Give waiting bodies to free slots; bounded slots take only small ones."""
        for slot in self._slots:
            if not slot.busy and (job := self._line.take(slot.most)) is not None:
                slot.busy = True
                slot.task = asyncio.ensure_future(self._run(slot, job))

    async def _run(self, slot: _Slot, job: _Job) -> None:
        try:
            _settle(job, await self._prepared(slot, job))
        except Exception as error:
            _settle(job, EngineDeadError(SHUTTING_DOWN) if self._closed else error)
        finally:
            slot.busy = False
            if not self._closed:
                self._dispatch()

    async def _prepared(self, slot: _Slot, job: _Job) -> Prepared | str:
        if slot.preparer is not None:
            try:
                return await slot.preparer.prepare(job)
            except WorkerGoneError:
                slot.preparer.close()
                if self._closed:
                    raise
                _log.exception("bodies are prepared in a thread from now on")
                slot.preparer = None
        return await self._threads.prepare(job)


def _settle(job: _Job, found: Prepared | str | Exception) -> None:
    """Pass the result to the job's waiter, unless it left or the event loop is closed."""
    if job.done.done():
        return
    with contextlib.suppress(RuntimeError):
        if isinstance(found, Exception):
            job.done.set_exception(found)
        else:
            job.done.set_result(found)

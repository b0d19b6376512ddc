"""The clients of one process: an event loop that sends requests when they are due.

Whoever is free takes the next number from a line that all processes share; so no process
runs dry while another one has requests left. A request is made before it waits for its
time, so that making it delays nothing that is measured. Connections are kept, and asked
again as soon as an answer has ended.
"""

import asyncio
import time
from collections.abc import Callable

from attrs import Factory, define, frozen

from minfer.effects.runs.load.http import Connection, HttpError
from minfer.effects.runs.load.load import Load
from minfer.effects.runs.load.record import INTERRUPTED, Failure, Record
from minfer.effects.runs.load.reply import Reply


@frozen
class Counts:
    """How far clients are."""

    sent: int = 0
    ended: int = 0
    failed: int = 0
    events: int = 0  # of requests that have ended

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            self.sent + other.sent,
            self.ended + other.ended,
            self.failed + other.failed,
            self.events + other.events,
        )


@define
class Client:
    """Puts a share of a load on a server; `lanes` is how many requests at once."""

    load: Load
    lanes: int | None
    take: Callable[[], int]  # the next number of the line
    begin: float  # monotonic
    records: list[Record] = Factory(list)
    sent: int = 0
    failed: int = 0
    events: int = 0
    _idle: list[Connection] = Factory(list)
    _tasks: set[asyncio.Task[None]] = Factory(set)
    _sender: asyncio.Task[None] | None = None

    @property
    def counts(self) -> Counts:
        """How far it is."""
        return Counts(self.sent, len(self.records), self.failed, self.events)

    async def run(self) -> list[Record]:
        """Send all, and wait for what was sent; returns what came of it."""
        free = asyncio.Semaphore(self.lanes) if self.lanes else None
        self._sender = asyncio.create_task(self._send(free))
        await asyncio.wait([self._sender])
        if not self._sender.cancelled():
            self._sender.result()  # raises what it raised
        while self._tasks:
            await asyncio.wait(self._tasks)
        for connection in self._idle:
            connection.close()
        return self.records

    def stop(self) -> None:
        """Send nothing more, and give up what is on its way."""
        for task in (self._sender, *self._tasks):
            if task is not None:
                task.cancel()

    async def _send(self, free: asyncio.Semaphore | None) -> None:
        """Start one request after the other, each when it is due and a lane is free."""
        load = self.load
        while True:
            if free is not None:
                await free.acquire()
            number = self.take()
            if load.count is not None and number >= load.count:
                return
            request = load.request(number)
            due = load.due[number] if load.due else self._now()
            await asyncio.sleep(max(0.0, due - self._now()))  # lets others run, too
            if load.duration is not None and self._now() >= load.duration:
                return
            task = asyncio.create_task(self._one(number, due, request, free))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            self.sent += 1

    def _now(self) -> float:
        return time.monotonic() - self.begin

    async def _one(
        self, number: int, due: float, request: bytes, free: asyncio.Semaphore | None
    ) -> None:
        """Send one request and keep what comes of it."""
        reply, sent = Reply(stream=self.load.target.stream), self._now()
        try:
            async with asyncio.timeout(self.load.timeout):
                await self._exchange(request, reply)
            failure = reply.failure()
        except TimeoutError:
            failure = Failure("timed out", f"no end within {self.load.timeout:g} s")
        except HttpError as error:
            failure = Failure(error.kind, str(error))
        except asyncio.CancelledError:
            failure = Failure(INTERRUPTED, "it was given up")
        self._keep(number, due, sent, reply, failure)
        if free is not None:
            free.release()

    async def _exchange(self, request: bytes, reply: Reply) -> None:
        """Ask on a connection that is idle, or on a new one. Raises HttpError."""
        address = self.load.target.address
        connection = self._idle.pop() if self._idle else await Connection.open(address)
        try:
            try:
                await connection.exchange(request, reply)
            except HttpError:
                # A server may close a connection that has been idle for a while, and
                # that may cross with our request. It was not read, so it is sent again.
                if not connection.used or reply.status:
                    raise
                connection.close()
                connection = await Connection.open(address)
                await connection.exchange(request, reply)
        except BaseException:
            connection.close()
            raise
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()

    def _keep(
        self, number: int, due: float, sent: float, reply: Reply, failure: Failure | None
    ) -> None:
        """Make the record of a request that has ended."""
        events = reply.events
        for i, moment in enumerate(events):
            events[i] = moment - self.begin
        self.records.append(
            Record(
                number=number,
                due=due,
                sent=sent,
                ended=reply.ended - self.begin if reply.ended else self._now(),
                events=events,
                tokens=reply.told_tokens(),
                prompt_tokens=reply.prompt_tokens,
                output_tokens=reply.output_tokens if reply.told else len(events),
                counted=not reply.told,
                failure=failure,
            )
        )
        self.events += len(events)
        self.failed += failure is not None and failure.kind != INTERRUPTED

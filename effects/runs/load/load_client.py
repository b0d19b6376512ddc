"""The clients of one process: an event loop that sends requests when they are due.

aiohttp sends the requests, as in `vllm bench serve`: an event costs it less than half of
what it costs httpx. Requests are never repeated, so each failure is seen and counted. A
request is built before it waits for its time, so that building it delays no measurement.
Connections are reused, but not for long: a server closes an idle connection after some
seconds, and a request that is sent at that moment would fail.
"""

import asyncio
import gc
import itertools
import json
import resource
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import aiohttp
from attrs import Factory, define, field, frozen

from minfer.effects.runs.load.load_prompts import Prompts
from minfer.effects.runs.load.reply_reader import ReplyReader
from minfer.effects.runs.load.request_record import (
    INTERRUPTED,
    ReplyError,
    RequestFailure,
    RequestRecord,
    one_line,
)

_LONGEST: Final = 6 * 3600.0  # seconds of a request, as in vLLM's command
_KEPT: Final = 2.0  # seconds of an idle connection; servers keep theirs 5 or more


@frozen
class LoadPlan:
    """A load: requests, their number, and their pace."""

    url: str  # where requests are posted
    model: str
    prompts: Prompts
    count: int  # requests
    due: Sequence[float] = ()  # seconds; empty: all at once
    max_concurrency: int | None = None
    key: str = field(default="", repr=False)
    body: Mapping[str, Any] = field(factory=dict)  # other fields of every request

    def request(self, number: int) -> bytes:
        """The body of a request."""
        prompt = self.prompts.prompt(number)
        fields: dict[str, Any] = {
            "model": self.model,
            "max_tokens": prompt.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.body,
        }
        rest = json.dumps(fields, separators=(",", ":"))[1:]
        return b"{" + prompt.field + b"," + rest.encode()


@frozen
class Outcome:
    """The results of a load."""

    records: Sequence[RequestRecord]  # by number
    seconds: float  # until the last answer ended
    cpu: Sequence[float]  # the share of a core that each client process used


def session(key: str, patience: float | None = None) -> aiohttp.ClientSession:
    """A session with as many connections as requests need."""
    headers = {"Accept-Encoding": "identity"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers=headers,
        timeout=aiohttp.ClientTimeout(total=patience or _LONGEST),
    )


def failure_of(error: Exception) -> RequestFailure:
    """The failure of an exchange that raised this error."""
    if isinstance(error, ReplyError):
        return RequestFailure(error.kind, str(error))
    if isinstance(error, TimeoutError):
        return RequestFailure("timed out", "the answer did not end in time")
    if isinstance(error, aiohttp.ClientConnectorError):
        refused = isinstance(error.os_error, ConnectionRefusedError)
        why = "connection refused" if refused else error.os_error.strerror
        return RequestFailure("not connected", why or str(error))
    if isinstance(error, aiohttp.ClientResponseError):
        return RequestFailure(
            "malformed", f"the answer is not HTTP: {one_line(error.message)}"
        )
    return RequestFailure("cut off", "the connection closed before the answer had ended")


@define
class Client:
    """Puts a load on a server."""

    load: LoadPlan
    take: Callable[[], int] = Factory(lambda: itertools.count().__next__)  # a number
    show: Callable[["Client"], None] = lambda _: None  # is called when a request ends
    records: list[RequestRecord] = Factory(list)
    sent: int = 0
    failed: int = 0
    _begin: float = 0.0  # monotonic
    _tasks: set[asyncio.Task[None]] = Factory(set)
    _loop: asyncio.AbstractEventLoop | None = None  # that sends, while it does
    _stopped: bool = False

    def run(self) -> Outcome:
        """Send all requests and wait for their answers."""
        _raise_file_limit()
        gc.freeze()  # garbage collections of present objects would delay measurements
        cpu, wall = time.process_time(), time.monotonic()
        asyncio.run(self.send_all())
        busy = (time.process_time() - cpu) / max(1e-9, time.monotonic() - wall)
        records = sorted(self.records, key=lambda one: one.number)
        return Outcome(records, max((r.ended for r in records), default=0.0), [busy])

    async def send_all(self) -> None:
        """Send all requests and wait for their answers."""
        self._begin = time.monotonic()
        self._loop = asyncio.get_running_loop()
        try:
            async with session(self.load.key) as http, asyncio.TaskGroup() as group:
                if not self._stopped:
                    self._start(group, self._send(http, group))
        finally:
            self._loop = None

    def stop(self) -> None:
        """Send nothing more, and cancel the requests in flight. A signal's handler may
        call this at any time: it wakes the loop, which may wait for what never comes.
        """
        self._stopped = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _start(
        self, group: asyncio.TaskGroup, work: Coroutine[Any, Any, None]
    ) -> asyncio.Task[None]:
        task = group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _send(self, http: aiohttp.ClientSession, group: asyncio.TaskGroup) -> None:
        """Start each request when it is due and `max_concurrency` allows it."""
        load = self.load
        free = asyncio.Semaphore(load.max_concurrency or load.count)
        while True:
            await free.acquire()
            number = self.take()
            if number >= load.count:
                return
            body = load.request(number)
            due = load.due[number] if load.due else self._now()
            await asyncio.sleep(max(0.0, due - self._now()))  # lets other tasks run, too
            if self._stopped:
                return
            task = self._start(group, self._send_one(http, number, due, body))
            task.add_done_callback(lambda _: free.release())
            self.sent += 1

    def _now(self) -> float:
        return time.monotonic() - self._begin

    async def _send_one(
        self, http: aiohttp.ClientSession, number: int, due: float, body: bytes
    ) -> None:
        """Send one request and keep its record."""
        reply, sent = ReplyReader(), self._now()
        try:
            await exchange(http, self.load.url, body, reply)
            failure = reply.failure()
        except (aiohttp.ClientError, OSError, ReplyError) as error:
            failure = failure_of(error)
        except asyncio.CancelledError:
            failure = RequestFailure(INTERRUPTED, "the run was interrupted")
        self._keep(number, due, sent, reply, failure)

    def _keep(
        self,
        number: int,
        due: float,
        sent: float,
        reply: ReplyReader,
        failure: RequestFailure | None,
    ) -> None:
        """Make the record of a request that has ended."""
        events = [moment - self._begin for moment in reply.events]
        record = RequestRecord(
            number=number,
            due=due,
            sent=sent,
            ended=events[-1] if events and failure is None else self._now(),
            events=events,
            prompt_tokens=reply.prompt_tokens,
            output_tokens=reply.output_tokens if reply.has_usage else len(events),
            counted=not reply.has_usage,
            failure=failure,
        )
        self.records.append(record)
        self.failed += failure is not None and not record.interrupted
        self.show(self)


async def exchange(
    http: aiohttp.ClientSession, url: str, body: bytes, reply: ReplyReader
) -> None:
    """Post a request and pass its answer to `reply`, part by part as it comes.

    Raises aiohttp.ClientError, OSError and ReplyError.
    """
    headers = {"Content-Type": "application/json"}
    async with http.post(url, data=body, headers=headers) as answer:
        reply.begin(answer.status, answer.content_type)
        async for part in answer.content.iter_any():
            reply.feed(part, time.monotonic())


def _raise_file_limit() -> None:
    """Allow as many connections as the system permits."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # some systems allow less than they report
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

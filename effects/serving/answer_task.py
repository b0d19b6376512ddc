"""One answer: its request goes to the engine, and the outputs go to its client.

    begin: prompts become the engine's requests, in a thread if they are long
       |
    follow: one task for each prompt, which writes the outputs of each engine turn;
       |    a window of them at once, so that one request never has all seats
    the end of the last prompt, or an error, ends the answer

An early end, as when the client disconnects, closes the engine's iterators: the request
is cancelled before the next step. An error reaches its own client only.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from typing import Final, NoReturn

import attrs
from starlette.requests import ClientDisconnect

from minfer.effects.live.constraints.grammar_masks import STUCK
from minfer.effects.live.errors import EngineDeadError, OverloadedError
from minfer.effects.live.link.quarantine import GIVEN_UP
from minfer.effects.live.request_names import prompt_name
from minfer.effects.serving.errors import CANCELLED, INTERNAL, SHUTTING_DOWN, ApiError
from minfer.effects.serving.protocol import (
    Endpoint,
    GenerationRequest,
    Served,
    Writer,
)
from minfer.effects.serving.server_state import Backend
from minfer.effects.serving.wire.stamp import Stamp
from minfer.effects.serving.wire.transport import Connection, Event
from minfer.effects.text.outputs import CompletionOutput, RequestOutput

_GONE: Final = 499  # a status after which no client retries by itself
Outputs = AsyncGenerator[RequestOutput]
LONG: Final = 8192  # tokens of prompts whose requests are made in a thread
PER_PROMPT: Final = 64  # tokens that equal the cost of one more request
AGAIN: Final = 0.25  # seconds until a later prompt is tried again after a full queue
OVERDUE: Final = 5.0  # seconds that the engine has to end a request that is too late


class Answer:
    """The answer to one request, written while the engine makes it."""

    def __init__(
        self,
        backend: Backend,
        endpoint: Endpoint,
        request: GenerationRequest,
        stamp: Stamp,
        connection: Connection,
    ) -> None:
        self.backend = backend
        self.endpoint = endpoint
        self.request = request
        self.stamp = stamp
        self.connection = connection
        self.transport = connection.transport(stream=request.stream, name=stamp.id)
        self.writer: Writer = endpoint.writer(stamp, request, backend.llm.tokenizer)
        self.writing = asyncio.Lock()
        self.spelling = asyncio.Lock()
        self.begun = False  # something was written
        self.late = False  # its time ran out
        self.samples = request.params.n  # of each prompt
        self.left = len(request.prompts)  # those that have not ended
        self.served: dict[int, Served] = {}  # those that have, by prompt

    async def run(self) -> None:
        """Answer, until the end or until the client disconnects."""
        try:
            async with asyncio.TaskGroup() as group:
                aside: list[asyncio.Task[None]] = []
                aside.append(group.create_task(self.connection.departed()))
                if (seconds := self.backend.time_for(self.request)) is not None:
                    aside.append(group.create_task(self._end_after(seconds)))
                outputs = await self._begun()
                in_order = iter(enumerate(outputs))
                several = range(
                    min(len(outputs), self.backend.window(self.request.width))
                )
                parts = [self._follow_all(in_order) for _ in several]
                await asyncio.wait([*map(group.create_task, parts)])
                for task in aside:
                    task.cancel()
        except* ClientDisconnect:
            pass
        except* Exception as errors:
            await self._fail(errors.exceptions[0])

    async def _begun(self) -> list[Outputs]:
        prompts = self.request.prompts
        work = sum(len(prompt.ids) + PER_PROMPT for prompt in prompts)
        if work <= LONG:
            return self._begin()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.backend.pool, self._begin)

    def _begin(self) -> list[Outputs]:
        """Check all prompts and make their requests. Raises the errors of `told_of`."""
        return [self._generated(i) for i in range(len(self.request.prompts))]

    def _generated(self, prompt: int) -> Outputs:
        request = self.request
        if request.pooled is not None:
            return self.backend.llm.pool(
                request.prompts[prompt],
                request.pooled.how,
                request_id=self._name(prompt),
                urgency=request.urgency,
            )
        return self.backend.llm.generate(
            request.prompts[prompt],
            request.beams or request.params,
            request_id=self._name(prompt),
            urgency=request.urgency,
            streaming=request.stream,
            shown=request.parsing.markers if request.parsing else (),
        )

    def _name(self, prompt: int) -> str:
        return prompt_name(self.stamp.id, prompt)

    async def _follow_all(self, prompts: Iterator[tuple[int, Outputs]]) -> None:
        """Follow one prompt after the other, as long as there are any."""
        for prompt, outputs in prompts:
            if self.late:
                self._too_late()
            following: Outputs | None = outputs
            while following is not None:
                following = await self._follow(prompt, following)
            if self.left:  # let other requests run in between
                await asyncio.sleep(0)

    async def _follow(self, prompt: int, outputs: Outputs) -> Outputs | None:
        """Write the outputs of one prompt, one write for each turn. Returns them to be
        followed again if a later prompt meets a full queue.
        """
        try:
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    await self._take(prompt, output)
        except OverloadedError:
            if not self.served:
                raise
            await asyncio.sleep(AGAIN)
            return self._generated(prompt)
        return None

    async def _take(self, prompt: int, output: RequestOutput) -> None:
        if output.prompt_logprobs is None:
            events, last = self._told(prompt, output)
        else:  # a long prompt's take a while to format: other requests run meanwhile
            loop = asyncio.get_running_loop()
            async with self.spelling:
                events, last = await loop.run_in_executor(
                    self.backend.pool, self._told, prompt, output
                )
        if events:
            await self._write(events, last=last)

    def _told(self, prompt: int, output: RequestOutput) -> tuple[list[Event], bool]:
        """The events of an output, and whether they are the last."""
        first = prompt * self.samples  # of its choices
        events: list[Event] = []
        for delta in self._ended(output):
            events += self.writer.write(first + delta.index, delta)
        if output.finished:
            self.left -= 1
            self.served[prompt] = Served.of(output)
        if not self.left:
            in_order = [self.served[i] for i in sorted(self.served)]
            events += self.writer.end(in_order)
        return events, not self.left

    def _ended(self, output: RequestOutput) -> list[CompletionOutput]:
        """The new outputs of samples. Raises the client's error for one that failed."""
        for delta in output.outputs:
            if delta.finish_reason == "error":
                if delta.error.startswith(STUCK):  # which is the client's own
                    raise ApiError(delta.error, self.request.constrained_by)
                self.backend.log.error("%s failed: %s", self.stamp.id, delta.error)
                if delta.error.startswith(GIVEN_UP):
                    raise ApiError(delta.error, None, "request_killed_engine", INTERNAL)
                raise ApiError(_FAILED, None, "engine_error", INTERNAL)
            if self.backend.closing:
                raise EngineDeadError(SHUTTING_DOWN)
            if delta.finish_reason == "cancelled" and not self.late:
                raise ApiError(CANCELLED, None, "cancelled", _GONE)
        if not self.late:
            return list(output.outputs)
        if not self.begun and not any(delta.token_ids for delta in output.outputs):
            self._too_late()
        return [_cut(delta) for delta in output.outputs]

    async def _end_after(self, seconds: float) -> None:
        """End the answer when its time is over: with its output so far, if any."""
        await asyncio.sleep(seconds)
        self.late = True
        prompts = range(len(self.request.prompts))
        self.backend.llm.front.cancel(self._name(prompt) for prompt in prompts)
        await asyncio.sleep(OVERDUE)
        self._too_late()

    def _too_late(self) -> NoReturn:
        seconds = self.backend.time_for(self.request)
        why = f"the answer was not there after {seconds:g} s: that is its time limit"
        raise ApiError(why, None, "timeout", 504)

    async def _write(self, events: list[Event], *, last: bool) -> None:
        """Write a part, after the parts of other prompts that wait for a slow client: the
        order is kept.
        """
        self.begun = True
        async with self.writing:
            await self.transport.write(events, last=last)

    async def _fail(self, error: Exception) -> None:
        """Send the client the error that ended the answer."""
        told = self.backend.told(error, self.endpoint.prompt_field, self.stamp.id)
        await self.transport.fail(self.endpoint.failure(told))


_FAILED: Final = "the request failed in the engine; the server's log says why"


def _cut(delta: CompletionOutput) -> CompletionOutput:
    """A sample that ran out of time, with the finish reason "length"."""
    if delta.finish_reason != "cancelled":
        return delta
    return attrs.evolve(delta, finish_reason="length")

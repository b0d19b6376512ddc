"""One answer: its request goes to the engine, and what comes back goes to its client.

    prepare: prompts become token ids, in a thread if the body is long
       |
    follow: one task for each prompt, which writes what each turn of the engine brings
       |
    the end of the last prompt, or an error, ends the answer

Whatever ends it early, as the client's departure does, closes the engine's iterators: the
request is cancelled before the next step. An error reaches its own client only.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator

from starlette.requests import ClientDisconnect

from minfer.effects.live.errors import EngineDeadError
from minfer.effects.serving.backend import Backend
from minfer.effects.serving.errors import INTERNAL, SHUTTING_DOWN, ApiError, told_of
from minfer.effects.serving.protocol import Endpoint, Inquiry, Served, Writer
from minfer.effects.serving.stamp import Stamp
from minfer.effects.serving.transports.transport import Connection, Event
from minfer.effects.text.outputs import CompletionOutput, RequestOutput

Outputs = AsyncGenerator[RequestOutput]


class Answer:
    """The answer to one inquiry, written while the engine makes it."""

    writer: Writer  # once the request is prepared

    def __init__(
        self,
        backend: Backend,
        endpoint: Endpoint,
        inquiry: Inquiry,
        stamp: Stamp,
        connection: Connection,
    ) -> None:
        self.backend = backend
        self.endpoint = endpoint
        self.inquiry = inquiry
        self.stamp = stamp
        self.connection = connection
        self.transport = connection.transport(stream=inquiry.stream, name=stamp.id)
        self.writing = asyncio.Lock()
        self.samples = 1  # of each prompt
        self.left = 0  # prompts that have not ended
        self.served: dict[int, Served] = {}  # those that have, by prompt

    async def run(self, *, long: bool) -> None:
        """Answer, for as long as the client is there; `long` prepares in a thread."""
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self.connection.departed())
                prompts = await self._prepared(long)
                self.left = len(prompts)
                parts = [self._follow(i, outputs) for i, outputs in enumerate(prompts)]
                await asyncio.wait([*map(group.create_task, parts)])
                watch.cancel()
        except* ClientDisconnect:
            pass
        except* Exception as errors:
            await self._fail(errors.exceptions[0])

    async def _prepared(self, long: bool) -> list[Outputs]:
        if not long:
            return self._prepare()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.backend.pool, self._prepare)

    def _prepare(self) -> list[Outputs]:
        """Check all prompts and make their requests. Raises what `told_of` knows."""
        llm = self.backend.llm
        request = self.inquiry.generation(llm)
        self.samples = request.params.n
        self.writer = self.endpoint.writer(self.stamp, request, llm.tokenizer)
        if request.pooled is not None:
            return [
                llm.pool(
                    prompt,
                    request.pooled.how,
                    request_id=f"{self.stamp.id}-{i}",
                    urgency=request.urgency,
                )
                for i, prompt in enumerate(request.prompts)
            ]
        return [
            llm.generate(
                prompt,
                request.params,
                request_id=f"{self.stamp.id}-{i}",
                urgency=request.urgency,
                streaming=request.stream,
            )
            for i, prompt in enumerate(request.prompts)
        ]

    async def _follow(self, prompt: int, outputs: Outputs) -> None:
        """Write what comes of one prompt: one write for a turn."""
        first = prompt * self.samples  # of its choices
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                events: list[Event] = []
                for delta in output.outputs:
                    self._check(delta)
                    events += self.writer.write(first + delta.index, delta)
                if output.finished:
                    self.left -= 1
                    self.served[prompt] = Served.of(output)
                if not self.left:
                    in_order = [self.served[i] for i in sorted(self.served)]
                    events += self.writer.end(in_order)
                if events:
                    await self._write(events, last=not self.left)

    def _check(self, delta: CompletionOutput) -> None:
        """Raise what a client is told of a sample that ended without a good reason."""
        if delta.finish_reason == "error":
            why = f"the request failed: {delta.error}"
            raise ApiError(why, None, "engine_error", INTERNAL)
        if self.backend.closing:
            raise EngineDeadError(SHUTTING_DOWN)
        if delta.finish_reason == "cancelled":
            raise EngineDeadError("the request was cancelled")

    async def _write(self, events: list[Event], *, last: bool) -> None:
        """Write a part; those of other prompts wait: a slow client's must not be
        overtaken.
        """
        async with self.writing:
            await self.transport.write(events, last=last)

    async def _fail(self, error: Exception) -> None:
        """Tell the client what ended the answer."""
        told = told_of(error, self.endpoint.prompt_field)
        if told.status == INTERNAL:
            logging.getLogger("uvicorn.error").exception("%s failed", self.stamp.id)
        await self.transport.fail(self.endpoint.failure(told))

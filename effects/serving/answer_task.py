"""One answer: its request goes to the engine, and the outputs go to its client.

    begin: prompts become the engine's requests, in a thread if they are long
       |
    follow: one task for each prompt, which writes the outputs of each engine turn;
       |    a window of them at once, so that one request never has all rows
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

from minfer.effects.cluster.link.crash_rule import GIVEN_UP, REFUSED
from minfer.effects.live.constraints.grammar_masks import STUCK_ERROR
from minfer.effects.live.errors import EngineDeadError, OverloadedError
from minfer.effects.live.request_names import prompt_name
from minfer.effects.serving.client_errors import (
    CANCELLED,
    INTERNAL,
    KILLED_ENGINE,
    SHUTTING_DOWN,
    ApiError,
)
from minfer.effects.serving.protocol import (
    AnswerWriter,
    Endpoint,
    GenerationRequest,
    PromptUsage,
)
from minfer.effects.serving.server_state import ServerState
from minfer.effects.serving.wire.stamp import Stamp
from minfer.effects.serving.wire.transport import Connection, StreamEvent
from minfer.effects.text.outputs import CompletionOutput, RequestOutput
from minfer.lifecycle.adapters import LOAD_FAILED

_CLIENT_CLOSED: Final = 499  # no client retries after it by itself
Outputs = AsyncGenerator[RequestOutput]
LONG_PROMPT_TOKENS: Final = 8192  # of prompts whose requests are made in a thread
PROMPT_COST_TOKENS: Final = 64  # they cost as much as one more request
QUEUE_RETRY_SECONDS: Final = 0.25  # a later prompt is tried again after a full queue
CANCEL_GRACE_SECONDS: Final = 5.0  # that the engine has to end a late request


class AnswerTask:
    """The answer to one request, written while the engine makes it."""

    def __init__(
        self,
        state: ServerState,
        endpoint: Endpoint,
        request: GenerationRequest,
        stamp: Stamp,
        connection: Connection,
    ) -> None:
        self.state = state
        self.endpoint = endpoint
        self.request = request
        self.stamp = stamp
        self.connection = connection
        self.transport = connection.transport(
            stream=request.stream, name=stamp.id, ignored=request.ignored
        )
        self.writer: AnswerWriter = endpoint.writer(stamp, request, state.llm.tokenizer)
        self.writing = asyncio.Lock()
        self.formatting = asyncio.Lock()
        self.started = False  # something was written
        self.timed_out = False  # its time ran out
        self.samples = request.params.n  # of each prompt
        self.unfinished = len(request.prompts)  # those that have not ended
        self.usages: dict[int, PromptUsage] = {}  # those that have, by prompt

    async def run(self) -> None:
        """Answer, until the end or until the client disconnects."""
        try:
            async with asyncio.TaskGroup() as group:
                watchers: list[asyncio.Task[None]] = []
                watchers.append(group.create_task(self.connection.wait_for_disconnect()))
                if (seconds := self.state.time_limit(self.request)) is not None:
                    watchers.append(group.create_task(self._end_after(seconds)))
                outputs = await self._start()
                in_order = iter(enumerate(outputs))
                max_running = self.state.max_running_prompts(self.request.width)
                slots = range(min(len(outputs), max_running))
                followers = [self._follow_all(in_order) for _ in slots]
                await asyncio.wait([*map(group.create_task, followers)])
                for task in watchers:
                    task.cancel()
        except* ClientDisconnect:
            pass
        except* Exception as errors:
            await self._fail(errors.exceptions[0])

    async def _start(self) -> list[Outputs]:
        prompts = self.request.prompts
        work = sum(len(prompt.ids) + PROMPT_COST_TOKENS for prompt in prompts)
        if work <= LONG_PROMPT_TOKENS:
            return self._start_prompts()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.state.pool, self._start_prompts)

    def _start_prompts(self) -> list[Outputs]:
        """Check all prompts and make their requests. Raises errors of `to_api_error`."""
        return [self._generate(i) for i in range(len(self.request.prompts))]

    def _generate(self, prompt: int) -> Outputs:
        request = self.request
        if request.pooled is not None:
            return self.state.llm.pool(
                request.prompts[prompt],
                request.pooled.pooling_type,
                request_id=self._request_id(prompt),
                urgency=request.urgency,
                adapter=request.adapter,
            )
        return self.state.llm.generate_deltas(
            request.prompts[prompt],
            request.beams or request.params,
            request_id=self._request_id(prompt),
            urgency=request.urgency,
            streaming=request.stream,
            shown=request.parsing.markers if request.parsing else (),
            adapter=request.adapter,
        )

    def _request_id(self, prompt: int) -> str:
        return prompt_name(self.stamp.id, prompt)

    async def _follow_all(self, prompts: Iterator[tuple[int, Outputs]]) -> None:
        """Follow one prompt after the other, as long as there are any."""
        for prompt, outputs in prompts:
            if self.timed_out:
                self._raise_timeout()
            following: Outputs | None = outputs
            while following is not None:
                following = await self._follow(prompt, following)
            if self.unfinished:  # let other requests run in between
                await asyncio.sleep(0)

    async def _follow(self, prompt: int, outputs: Outputs) -> Outputs | None:
        """Write the outputs of one prompt, one write for each turn. Returns them to be
        followed again if a later prompt meets a full queue.
        """
        try:
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    await self._write_output(prompt, output)
        except OverloadedError:
            if not self.usages:
                raise
            await asyncio.sleep(QUEUE_RETRY_SECONDS)
            return self._generate(prompt)
        return None

    async def _write_output(self, prompt: int, output: RequestOutput) -> None:
        if output.prompt_logprobs is None:
            events, last = self._make_events(prompt, output)
        else:  # a long prompt's take a while to format: other requests run meanwhile
            loop = asyncio.get_running_loop()
            async with self.formatting:
                events, last = await loop.run_in_executor(
                    self.state.pool, self._make_events, prompt, output
                )
        if events:
            await self._write(events, last=last)

    def _make_events(
        self, prompt: int, output: RequestOutput
    ) -> tuple[list[StreamEvent], bool]:
        """The events of an output, and whether they are the last."""
        first_choice = prompt * self.samples  # of its choices
        events: list[StreamEvent] = []
        for delta in self._check_outputs(output):
            events += self.writer.write(first_choice + delta.index, delta)
        if output.finished:
            self.unfinished -= 1
            self.usages[prompt] = PromptUsage.of(output)
        if not self.unfinished:
            in_order = [self.usages[i] for i in sorted(self.usages)]
            events += self.writer.end(in_order)
        return events, not self.unfinished

    def _check_outputs(self, output: RequestOutput) -> list[CompletionOutput]:
        """The new outputs of samples. Raises the client's error for one that failed."""
        for delta in output.outputs:
            if delta.finish_reason == "error":
                if delta.error.startswith(STUCK_ERROR):  # which is the client's own
                    raise ApiError(delta.error, self.request.constraint_field)
                self.state.log.error("%s failed: %s", self.stamp.id, delta.error)
                if delta.error.startswith(LOAD_FAILED):
                    raise ApiError(_ADAPTER_FAILED, None, "adapter_failed", INTERNAL)
                if delta.error.startswith(GIVEN_UP):
                    raise ApiError(delta.error, None, KILLED_ENGINE, INTERNAL)
                if delta.error.startswith(REFUSED):  # an equal request crashed an engine
                    raise ApiError(delta.error, None, KILLED_ENGINE)
                raise ApiError(_ENGINE_FAILED, None, "engine_error", INTERNAL)
            if self.state.closing:
                raise EngineDeadError(SHUTTING_DOWN)
            if delta.finish_reason == "cancelled" and not self.timed_out:
                raise ApiError(CANCELLED, None, "cancelled", _CLIENT_CLOSED)
        if not self.timed_out:
            return list(output.outputs)
        if not self.started and not any(delta.token_ids for delta in output.outputs):
            self._raise_timeout()
        return [_cut_at_deadline(delta) for delta in output.outputs]

    async def _end_after(self, seconds: float) -> None:
        """End the answer when its time is over: with its output so far, if any."""
        await asyncio.sleep(seconds)
        self.timed_out = True
        prompts = range(len(self.request.prompts))
        self.state.llm.frontend.cancel(self._request_id(prompt) for prompt in prompts)
        await asyncio.sleep(CANCEL_GRACE_SECONDS)
        self._raise_timeout()

    def _raise_timeout(self) -> NoReturn:
        seconds = self.state.time_limit(self.request)
        message = f"the answer was not there after {seconds:g} s: that is its time limit"
        raise ApiError(message, None, "timeout", 504)

    async def _write(self, events: list[StreamEvent], *, last: bool) -> None:
        """Write a part, after the parts of other prompts that wait for a slow client: the
        order is kept.
        """
        self.started = True
        async with self.writing:
            await self.transport.write(events, last=last)

    async def _fail(self, error: Exception) -> None:
        """Send the client the error that ended the answer."""
        failure = self.state.api_error(error, self.endpoint.prompt_field, self.stamp.id)
        await self.transport.fail(self.endpoint.failure(failure))


_ADAPTER_FAILED: Final = (
    "the adapter of this request could not be loaded; the server's log says why, and an "
    "administrator may load it again"
)
_ENGINE_FAILED: Final = "the request failed in the engine; the server's log says why"


def _cut_at_deadline(delta: CompletionOutput) -> CompletionOutput:
    """A sample that ran out of time, with the finish reason "length"."""
    if delta.finish_reason != "cancelled":
        return delta
    return attrs.evolve(delta, finish_reason="length")

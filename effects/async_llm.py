"""The library for programs that serve many at once: an async iterator per request.

    async with AsyncLLM() as llm:
        async for output in llm.generate("def add(a, b):", SamplingParams(max_tokens=32)):
            print(output.outputs[0].text, end="")

The engine runs in a thread of its own. What is new of a request stays with it until its reader
comes; the thread rings once for all that a turn brought, and the event loop wakes the readers
concerned. Nobody polls, and what a slow reader did not take yet comes in one piece.
"""

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, Self, Unpack

from minfer.effects.assembly import Assembly
from minfer.effects.edge import Asked, OverloadedError, Prompt, RequestError, Urgency, params_for
from minfer.effects.llm import ServedModel
from minfer.effects.outputs import RequestOutput
from minfer.effects.worker import EngineDeadError
from minfer.request import SamplingParams

if TYPE_CHECKING:
    from minfer.effects.chat import ChatOptions, Conversation

__all__ = ["AsyncLLM", "EngineDeadError", "OverloadedError", "RequestError"]


class AsyncLLM(ServedModel):
    """A model that serves the tasks of one event loop. Settings and errors: `ServedModel`'s.

    It loads at once, before any loop needs to run.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        super().__init__(model, **settings)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._readers: dict[Assembly, asyncio.Event] = {}  # touched by the loop alone
        self._fresh: deque[Assembly] = deque()  # those with news, each once
        self._ringing = False  # the loop was asked to look at them
        self.worker.observers.append(self._ring)

    @property
    def errored(self) -> bool:
        """Whether the engine is closed, or broke, and serves nobody any more."""
        return self.worker.dead is not None

    def generate(
        self,
        prompt: Prompt | Asked,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        urgency: Urgency = Urgency(),
        streaming: bool = True,
    ) -> AsyncGenerator[RequestOutput]:
        """Complete a prompt, and yield what is new of it (vLLM's DELTA); the last is `finished`.

        Without `streaming` there is one output, at the end: its reader is woken once.
        Prompts and parameters are as for `LLM.generate`; ids of live requests must differ. Raises
        at once RequestError, OverloadedError if too many wait, and EngineDeadError; the first
        output may still, if things changed meanwhile: only then the request enters the engine.
        Closing the iterator, or cancelling the task that waits in it, cancels the request.
        """
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = params_for(sampling_params, 1)[0]
        if request_id is not None and (not isinstance(request_id, str) or not request_id):
            raise RequestError(f"request_id must be a string that is not empty, not {request_id!r}")
        with self.numbers:
            name = request_id or f"{self.count}-{secrets.token_hex(8)}"
            job = self._job(prompt, self._hear, streaming, params, self.count, urgency, name)
            self.count += 1
        self.worker.check(job)
        waiting, most = len(self.worker.driver.state.waiting), self.setup.config.max_waiting
        if waiting + params.n > most:
            raise OverloadedError(
                f"{waiting} samples wait already, of at most {most} (max_waiting); try again later"
            )
        return self._deltas(job)

    def chat(
        self,
        messages: "Conversation",
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        urgency: Urgency = Urgency(),
        **how: Unpack["ChatOptions"],
    ) -> AsyncGenerator[RequestOutput]:
        """Answer a conversation; options are those of `LLM.chat`, all else as for `generate`.

        Raises ChatTemplateError too.
        """
        if sampling_params is None:
            sampling_params = self.setup.default_sampling_params(max_tokens=None)
        asked = self._rendered(messages, how)
        return self.generate(asked, sampling_params, request_id=request_id, urgency=urgency)

    async def abort(self, request_id: str) -> None:
        """End a request: its reader gets a last output, with the finish reason "cancelled"."""
        self.worker.cancel([request_id])

    async def _deltas(self, job: Assembly) -> AsyncGenerator[RequestOutput]:
        self._bind(asyncio.get_running_loop())
        self.worker.submit([job])
        news = self._readers[job] = asyncio.Event()
        try:
            finished = False
            while not finished:
                await news.wait()
                news.clear()
                output = job.take()
                if job.rejected:  # all else was checked: the line was full when it arrived
                    raise OverloadedError(f"{job.rejected}; try again later")
                finished = output.finished
                yield output
        finally:
            del self._readers[job]
            if not job.finished:
                self.worker.cancel([job.request.id])

    def _bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Serve the tasks of this loop from now on."""
        if self._loop is loop:
            return
        if self._readers:
            raise RuntimeError("an AsyncLLM serves one event loop; it has readers in another one")
        self._loop, self._ringing = loop, False
        self._fresh.clear()

    def _hear(self, job: Assembly) -> None:
        """Note, in the engine's thread, that a request has news."""
        self._fresh.append(job)
        if job.error is not None:  # no turn follows, after which it would be rung for
            self._ring()

    def _ring(self, *_: object) -> None:
        if self._fresh and not self._ringing and self._loop is not None:
            self._ringing = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
                self._loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        """Wake the readers that have news, in the event loop."""
        self._ringing = False  # first: what comes from now on rings again
        while self._fresh:
            news = self._readers.get(self._fresh.popleft())
            if news is not None:
                news.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)  # which waits for the step that runs

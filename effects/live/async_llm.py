"""The library for programs that serve many requests at once: an async iterator per
request.

All outputs of a turn come together: from the engine's thread or, over an engine of
another process, in the event loop itself. They notify the loop once, and it wakes the
readers concerned. No reader polls, and a slow reader gets all outputs since its last read
in one piece.
"""

import asyncio
import contextlib
import secrets
import threading
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from attrs import evolve

from minfer.effects.live.absent_features import refuse_given
from minfer.effects.live.adapters.lora_request import LoRARequest
from minfer.effects.live.adapters.served_adapters import digest_of
from minfer.effects.live.beams.beam_search import BeamSearchParams
from minfer.effects.live.client import EngineClient
from minfer.effects.live.input_processing.input_processor import (
    OverloadedError,
    RequestError,
    SchedulingHints,
    TokenizedPrompt,
    params_for,
)
from minfer.effects.live.input_processing.prompts import Prompt
from minfer.effects.live.input_processing.template_settings import read_call_template
from minfer.effects.live.served_model import ServedModel
from minfer.effects.text.cumulative_outputs import CumulativeRequest
from minfer.effects.text.output_processor import OutputProcessor
from minfer.effects.text.outputs import EmbeddingRequestOutput, RequestOutput
from minfer.records.request import LAST, SamplingParams
from minfer.sampling.params import RequestOutputKind

if TYPE_CHECKING:
    from minfer.effects.text.chat_templates import ChatOptions, Conversation, Tools


class AsyncLLM(ServedModel):
    """A model that serves the tasks of one event loop.

    The constructor, `__init__` below, explains all settings and errors.
    """

    def _attach(self, client: EngineClient, first: int) -> None:
        super()._attach(client, first)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._readers = 0  # in that loop
        self._entry = threading.Lock()  # while either changes
        self._ready: deque[asyncio.Event] = (
            deque()
        )  # of readers whose requests have new output
        self._wake_scheduled = False  # a callback to set them is scheduled
        self.frontend.after.append(self._schedule_wake)

    @property
    def errored(self) -> bool:
        """Whether the engine is closed or broken, and serves no requests."""
        return self.client.dead is not None

    def generate(
        self,
        prompt: Prompt | TokenizedPrompt,
        sampling_params: SamplingParams | BeamSearchParams | None = None,
        request_id: str | None = None,
        *,
        urgency: SchedulingHints = SchedulingHints(),
        priority: int | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Complete a prompt, and yield its output as it grows; the last is `finished`.

        An output holds all text and tokens so far, of all samples that have any. With
        `output_kind` of the parameters "delta" it holds what is new, and with
        "final_only" there is one, at the end; so it always is for a beam search, with the
        best sequences in their order. `priority` is that of `urgency`; the last three
        arguments are vLLM's, and must be None. `lora_request` names an adapter: its
        files are read at its first use, in this thread. Other arguments are as for
        `LLM.generate`; ids of live requests must differ. Raises RequestError,
        OverloadedError if too many wait, and EngineDeadError, at once or, if things
        changed since, at the first output: only then the request enters the engine.
        Closing the iterator, or cancelling its task, cancels it.
        """
        refuse_given(
            tokenization_kwargs=tokenization_kwargs,
            trace_headers=trace_headers,
            data_parallel_rank=data_parallel_rank,
        )
        if priority is not None:
            urgency = evolve(urgency, priority=priority)
        kind = _output_kind(sampling_params)
        deltas = self.generate_deltas(
            prompt,
            sampling_params,
            request_id=request_id,
            urgency=urgency,
            streaming=kind is not RequestOutputKind.FINAL_ONLY,
            adapter=digest_of(self.adapters, lora_request),
        )
        return deltas if kind is not RequestOutputKind.CUMULATIVE else _grow(deltas)

    def generate_deltas(
        self,
        prompt: Prompt | TokenizedPrompt,
        sampling_params: SamplingParams | BeamSearchParams | None = None,
        *,
        request_id: str | None = None,
        urgency: SchedulingHints = SchedulingHints(),
        streaming: bool = True,
        shown: Iterable[str] = (),
        adapter: str = "",
    ) -> AsyncGenerator[RequestOutput]:
        """Complete a prompt, and yield what is new whatever the parameters' output kind;
        without `streaming` one output, at the end. Special tokens are left out of the
        text, but for those that are `shown`. `adapter` is a digest. Otherwise as
        `generate`.
        """
        params = sampling_params or self.get_default_sampling_params()
        if not isinstance(params, BeamSearchParams):
            params = params_for(params, 1)[0]
        _check_id(request_id)
        ready = asyncio.Event()
        with self.numbers:
            name = request_id or f"{self.count}-{secrets.token_hex(8)}"
            sink = partial(self._note_ready, ready)
            processor = self._make_processor(
                prompt,
                sink,
                params,
                count=self.count,
                streaming=streaming,
                urgency=urgency,
                name=name,
                shown=shown,
                adapter=adapter,
            )
            self.count += 1
        self.frontend.check(processor)
        return self._deltas(processor, ready)

    def chat(
        self,
        messages: "Conversation",
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        urgency: SchedulingHints = SchedulingHints(),
        lora_request: LoRARequest | None = None,
        chat_template: str | Path | None = None,
        tools: "Tools | None" = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Answer a conversation; options and errors are those of `LLM.chat` and
        `generate`.
        """
        if sampling_params is None:
            sampling_params = self.setup.default_sampling_params(max_tokens=None)
        options: ChatOptions = {
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": chat_template_kwargs,
        }
        self._check_tools(tools)
        template = read_call_template(chat_template)
        prompt_ids = self._render_prompt(messages, options, template)
        return self.generate(
            prompt_ids,
            sampling_params,
            request_id=request_id,
            urgency=urgency,
            lora_request=lora_request,
        )

    async def embed(
        self,
        prompt: Prompt | TokenizedPrompt,
        *,
        pooling: str = LAST,
        normalize: bool = True,
        request_id: str | None = None,
        urgency: SchedulingHints = SchedulingHints(),
        lora_request: LoRARequest | None = None,
    ) -> EmbeddingRequestOutput:
        """Make a vector of a prompt, as `LLM.embed` does. Raises as `generate` does;
        cancelling it cancels the request.
        """
        adapter = digest_of(self.adapters, lora_request)
        processor, ready = self._make_pooled(
            prompt, pooling, request_id, urgency, adapter
        )
        async for _ in self._deltas(processor, ready):
            pass
        return processor.embedding(normalize=normalize)

    def pool(
        self,
        prompt: Prompt | TokenizedPrompt,
        pooling: str = LAST,
        *,
        request_id: str | None = None,
        urgency: SchedulingHints = SchedulingHints(),
        adapter: str = "",
    ) -> AsyncGenerator[RequestOutput]:
        """Make a vector like `embed`, in the form of `generate`: one output, whose only
        sample has no token, and the vector as it was computed. `adapter` is a digest.
        """
        return self._deltas(
            *self._make_pooled(prompt, pooling, request_id, urgency, adapter)
        )

    def _make_pooled(
        self,
        prompt: Prompt | TokenizedPrompt,
        pooling: str,
        request_id: str | None,
        urgency: SchedulingHints,
        adapter: str,
    ) -> tuple[OutputProcessor, asyncio.Event]:
        _check_id(request_id)
        ready = asyncio.Event()
        with self.numbers:
            name = request_id or f"{self.count}-{secrets.token_hex(8)}"
            sink = partial(self._note_ready, ready)
            processor = self._make_processor(
                prompt,
                sink,
                pooling,
                count=self.count,
                urgency=urgency,
                name=name,
                adapter=adapter,
            )
            self.count += 1
        self.frontend.check(processor)
        return processor, ready

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End a request, or several: their readers get a last output, with the finish
        reason "cancelled". Ids of no live request are ignored.
        """
        ids = [request_id] if isinstance(request_id, str) else [*request_id]
        self.frontend.cancel(ids)

    async def _deltas(
        self, processor: OutputProcessor, ready: asyncio.Event
    ) -> AsyncGenerator[RequestOutput]:
        with self._reading():
            self.frontend.submit([processor])
            try:
                while True:
                    await ready.wait()
                    ready.clear()
                    # Log-probabilities of a long prompt take a while to read.
                    reads_scores = processor.scores is not None and bool(
                        processor.scores.unread_chunks
                    )
                    output = (
                        await asyncio.to_thread(processor.take)
                        if reads_scores
                        else processor.take()
                    )
                    if processor.rejected:  # all else was checked: the queue is full now
                        raise OverloadedError(f"{processor.rejected}; try again later")
                    yield output
                    if output.finished:
                        return
            finally:
                if not processor.finished:
                    self.frontend.cancel([processor.request.id])

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Count a reader in the running event loop. Raises RuntimeError if there are
        readers in another.
        """
        loop = asyncio.get_running_loop()
        with self._entry:  # the other loop may be another thread's
            if self._loop is not loop:
                if self._readers:
                    raise RuntimeError(
                        "an AsyncLLM serves one event loop; it has readers in another"
                    )
                self._loop = loop
                self._wake_scheduled = False
                self._ready.clear()
            self._readers += 1
        try:
            yield
        finally:
            with self._entry:
                self._readers -= 1

    def _note_ready(self, ready: asyncio.Event, processor: OutputProcessor) -> None:
        """Note that a request has new output, in the thread in which outputs come."""
        self._ready.append(ready)
        if processor.error is not None:  # no turn follows that would notify the loop
            self._schedule_wake()

    def _schedule_wake(self) -> None:
        if self._ready and not self._wake_scheduled and self._loop is not None:
            self._wake_scheduled = True
            # RuntimeError: the loop is closed, and there are no readers.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._wake_readers)

    def _wake_readers(self) -> None:
        """Wake the readers with new output, in the event loop."""
        self._wake_scheduled = False  # first, so that later outputs schedule another call
        while self._ready:
            self._ready.popleft().set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)  # close waits for the step that runs


def _output_kind(
    params: SamplingParams | BeamSearchParams | None,
) -> RequestOutputKind:
    """Returns what a request's outputs hold. The best samples, and the sequences of a
    search, are known at the end.
    """
    if params is None:
        return RequestOutputKind.CUMULATIVE
    if isinstance(params, BeamSearchParams):
        return RequestOutputKind.FINAL_ONLY
    if params.chooses and params.output_kind is RequestOutputKind.CUMULATIVE:
        return RequestOutputKind.FINAL_ONLY
    return params.output_kind


async def _grow(
    deltas: AsyncGenerator[RequestOutput],
) -> AsyncGenerator[RequestOutput]:
    """Yield all output so far, for each that holds what is new."""
    request = CumulativeRequest()
    async with contextlib.aclosing(deltas):
        async for delta in deltas:
            yield request.add(delta)


def _check_id(name: object) -> None:
    """Raise RequestError for an invalid request id; None means no id."""
    if name is not None and (not isinstance(name, str) or not name):
        raise RequestError(f"request_id must be a string that is not empty, not {name!r}")

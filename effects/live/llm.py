"""The library: `from minfer import LLM, SamplingParams`.

    with LLM() as llm:
        params = SamplingParams(max_tokens=32)
        for output in llm.generate(["def add(a, b):", "import "], params):
            print(output.outputs[0].text)

The engine runs in this process, in a thread that lives while requests are served.
Requests from several threads share it and are batched together.
"""

import contextlib
import logging
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Self

from attrs import evolve, frozen

from minfer.effects.live.absent_features import refuse_given
from minfer.effects.live.adapters.lora_request import LoRARequest
from minfer.effects.live.adapters.served_adapters import digest_of
from minfer.effects.live.beams.beam_search import (
    BeamSearchOutput,
    BeamSearchParams,
    searches_for,
)
from minfer.effects.live.input_processing import input_processor
from minfer.effects.live.input_processing.input_processor import Params, TokenizedPrompt
from minfer.effects.live.input_processing.prompts import Prompt, as_list
from minfer.effects.live.input_processing.template_settings import read_call_template
from minfer.effects.live.pooling_params import PoolingParams, pooling_params_for
from minfer.effects.live.served_model import ServedModel as ServedModel
from minfer.effects.text.output_processor import OutputProcessor
from minfer.effects.text.outputs import EmbeddingRequestOutput, RequestOutput
from minfer.records.request import SamplingParams

if TYPE_CHECKING:
    from minfer.effects.text.chat_templates import ChatOptions, Conversations, Tools

Prompts = Prompt | Sequence[Prompt]
Priorities = int | Sequence[int] | None
# Whether to show a progress bar, or a function that makes one, like tqdm.
Progress = bool | Callable[..., Any]
# For all prompts, or for each.
LoraRequests = LoRARequest | Sequence[LoRARequest | None] | None
Inbox = SimpleQueue[OutputProcessor]
_CONTENT_FORMATS: Final = ("auto", "string", "openai")
_log = logging.getLogger("minfer.llm")


@frozen
class RequestBatch:
    """Requests of one call, in its order, and the queue of those with new output."""

    processors: list[OutputProcessor]
    inbox: Inbox


class LLM(ServedModel):
    """A model that generates text from prompts and answers in conversations.

    The constructor, `__init__` below, explains all settings and errors.
    """

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Params | None = None,
        *,
        use_tqdm: Progress = True,
        priority: Priorities = None,
        lora_request: LoraRequests = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; the outputs come in the order of the prompts.

        A prompt is a string, a list of token ids, or {"prompt": ...} or
        {"prompt_token_ids": ...}, where "cache_salt" keeps its cached prefix apart from
        others'. `sampling_params` are one for all or one for each; None is the model's
        generation_config.json, and 16 tokens. `priority` is one for all or one for each,
        and so is the adapter, `lora_request`, which needs `enable_lora`;
        `tokenization_kwargs` is vLLM's, and must be None.

        Raises RequestError, before anything runs, if a request could never be served; its
        `index` is the request's. A request whose steps fail ends with the finish reason
        "error", and the others continue. An interrupt cancels the requests of this call,
        and the LLM stays usable.
        """
        refuse_given(tokenization_kwargs=tokenization_kwargs)
        batch = self._make_checked_batch(
            as_list(prompts), sampling_params, priority, adapters=lora_request
        )
        return self._complete(batch, use_tqdm)

    def beam_search(
        self,
        prompts: Prompts,
        params: BeamSearchParams | Sequence[BeamSearchParams],
        *,
        lora_request: LoraRequests = None,
        use_tqdm: Progress = True,
        priority: Priorities = None,
    ) -> list[BeamSearchOutput]:
        """Find the likeliest continuations of prompts; the outputs come in their order.

        `params` are one for all or one for each; prompts, adapters and errors are as for
        `generate`.
        """
        inputs = as_list(prompts)
        searches = searches_for(params, len(inputs))
        batch = self._make_batch(inputs, searches, priority, adapters=lora_request)
        outputs = self._complete(batch, use_tqdm)
        return [BeamSearchOutput.of(output, self.tokenizer) for output in outputs]

    def chat(
        self,
        messages: "Conversations",
        sampling_params: Params | None = None,
        use_tqdm: Progress = True,
        lora_request: LoraRequests = None,
        *,
        priority: Priorities = None,
        chat_template: str | Path | None = None,
        chat_template_content_format: str = "auto",
        tools: "Tools | None" = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations; the outputs come in the order of the conversations.

        A conversation is a list of {"role": ..., "content": ...}; the model's chat
        template makes its prompt. `tools` are JSON descriptions of functions for it;
        `continue_final_message` leaves the last message open instead of beginning a new
        one, and needs `add_generation_prompt` to be false; `chat_template` is another
        template, as its text or a file's path, and `chat_template_kwargs` are further
        variables of the template. `sampling_params` are as for `generate`, but None lets
        an answer take all room in the context; `lora_request` is as there. The template
        decides whether contents are texts or lists, whatever
        `chat_template_content_format` says; the other arguments are vLLM's, and must be
        None.

        Raises ChatTemplateError, and as `generate` does; and RequestError for tools if it
        is unknown how the model calls them: see `tool_call_parser` of `EngineArgs`.
        """
        options: ChatOptions = {
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": chat_template_kwargs,
        }
        refuse_given(
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        _note_content_format(chat_template_content_format)
        batch = self._make_chat_batch(
            messages,
            sampling_params,
            options,
            priority=priority,
            template=read_call_template(chat_template),
            adapters=lora_request,
        )
        return self._complete(batch, use_tqdm)

    def stream(
        self,
        prompts: Prompts,
        sampling_params: Params | None = None,
        *,
        priority: Priorities = None,
        lora_request: LoraRequests = None,
    ) -> Generator[RequestOutput]:
        """Complete prompts, and yield new output of any of them as soon as it is there.

        Outputs hold new text and new tokens only (vLLM's DELTA), of the samples that have
        any; the last one of a request is `finished`. Requests run once the first output
        is taken, and leaving the loop early cancels them. Raises as `generate` does, at
        once.
        """
        batch = self._make_checked_batch(
            as_list(prompts),
            sampling_params,
            priority,
            streaming=True,
            adapters=lora_request,
        )
        return self._deltas(batch)

    def stream_chat(
        self,
        messages: "Conversations",
        sampling_params: Params | None = None,
        *,
        tools: "Tools | None" = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoraRequests = None,
    ) -> Generator[RequestOutput]:
        """Answer conversations like `chat`, and yield new output like `stream`."""
        options: ChatOptions = {
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": chat_template_kwargs,
        }
        batch = self._make_chat_batch(
            messages, sampling_params, options, streaming=True, adapters=lora_request
        )
        return self._deltas(batch)

    def embed(
        self,
        prompts: Prompts,
        *,
        use_tqdm: Progress = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoraRequests = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        pooling: str | None = None,
        normalize: bool | None = None,
        priority: Priorities = None,
    ) -> list[EmbeddingRequestOutput]:
        """Make a vector of each prompt, in their order: `output.outputs.embedding`.

        It is of hidden states after the model's final norm: the last token's, or with
        `pooling` "mean" the mean of all tokens'; of length 1, unless `normalize` is
        false. `pooling_params`, one for all or one for each, say the same in vLLM's
        names. Prompts, adapters and errors are as for `generate`; a prompt that fails
        has no vector but an error.
        """
        refuse_given(tokenization_kwargs=tokenization_kwargs)
        inputs = as_list(prompts)
        digests = self._digests(lora_request, len(inputs))
        params = pooling_params_for(
            pooling_params, len(inputs), self.setup.spec.hidden_size
        )
        if pooling is not None:
            params = [evolve(each, pooling=pooling) for each in params]
        if normalize is not None:
            params = [evolve(each, use_activation=normalize) for each in params]
        hints = input_processor.scheduling_hints_for(priority, len(inputs))
        inbox: Inbox = SimpleQueue()
        with self.numbers:
            first = self.count

            def make_processor(i: int) -> OutputProcessor:
                return self._make_processor(
                    inputs[i],
                    inbox.put,
                    params[i].pooling,
                    count=first + i,
                    urgency=hints[i],
                    adapter=digests[i],
                )

            processors = [
                _make_numbered(make_processor, i, len(inputs)) for i in range(len(inputs))
            ]
            self.count += len(processors)
        with _progress(len(processors), use_tqdm) as advance:
            return self._complete_embeddings(
                RequestBatch(processors, inbox), advance, params
            )

    def encode(
        self,
        prompts: Prompts,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: Progress = True,
        lora_request: LoraRequests = None,
        pooling_task: str | None = "embed",
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Make a vector of each prompt, like `embed`: `output.outputs.data` is a tensor.
        vLLM's name. Raises RequestError for another `pooling_task` than "embed".
        """
        if pooling_task not in ("embed", None):
            raise input_processor.RequestError(
                f"pooling_task: {pooling_task!r} is not supported; a prompt becomes one "
                "vector, with 'embed'",
                param="pooling_task",
            )
        return self.embed(
            prompts,
            use_tqdm=use_tqdm,
            pooling_params=pooling_params,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
        )

    def _complete_embeddings(
        self,
        batch: RequestBatch,
        advance: Callable[[], object],
        params: Sequence[PoolingParams],
    ) -> list[EmbeddingRequestOutput]:
        """Submit jobs, and wait for all; any exception cancels them."""
        outputs: dict[str, EmbeddingRequestOutput] = {}
        params_of = dict(zip(batch.processors, params, strict=True))
        try:
            self.frontend.submit(batch.processors)
            for _ in batch.processors:
                processor = batch.inbox.get()
                output = processor.embedding(
                    normalize=params_of[processor].normalize,
                    dimensions=params_of[processor].dimensions,
                )
                outputs[output.request_id] = output
                advance()
        except BaseException:
            self.frontend.drop(batch.processors)
            raise
        return [outputs[job.request.id] for job in batch.processors]

    def _complete(self, batch: RequestBatch, use_tqdm: Progress) -> list[RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        ready = self._deltas(batch)
        with (
            contextlib.closing(ready),
            _progress(len(batch.processors), use_tqdm) as advance,
        ):
            for output in ready:
                outputs[output.request_id] = output
                advance()
        return [outputs[job.request.id] for job in batch.processors]

    def _deltas(self, batch: RequestBatch) -> Generator[RequestOutput]:
        """Submit jobs, and yield their outputs; any exception cancels them."""
        num_left = len(batch.processors)
        try:
            self.frontend.submit(batch.processors)
            while num_left:
                output = _take_output(batch.inbox)
                num_left -= output.finished
                yield output
        except BaseException:
            self.frontend.drop(batch.processors)
            raise

    def _make_chat_batch(
        self,
        messages: "Conversations",
        params: Params | None,
        options: "ChatOptions",
        *,
        priority: Priorities = None,
        template: str | None = None,
        streaming: bool = False,
        adapters: LoraRequests = None,
    ) -> RequestBatch:
        from minfer.effects.text.chat_templates import conversations

        self._check_tools(options.get("tools"))
        chat_prompts = [
            self._render_prompt(conversation, options, template)
            for conversation in conversations(messages)
        ]
        if params is None:
            params = self.setup.default_sampling_params(max_tokens=None)
        return self._make_checked_batch(
            chat_prompts, params, priority, streaming=streaming, adapters=adapters
        )

    def _make_checked_batch(
        self,
        inputs: Sequence[Prompt | TokenizedPrompt],
        params: Params | None,
        priority: Priorities,
        *,
        streaming: bool = False,
        adapters: LoraRequests = None,
    ) -> RequestBatch:
        """Check everything, then make the requests: all of them or none."""
        if params is None:
            params = self.get_default_sampling_params()
        all_params = input_processor.params_for(params, len(inputs))
        return self._make_batch(
            inputs, all_params, priority, streaming=streaming, adapters=adapters
        )

    def _make_batch(
        self,
        inputs: Sequence[Prompt | TokenizedPrompt],
        all_params: Sequence[SamplingParams | BeamSearchParams],
        priority: Priorities,
        *,
        streaming: bool = False,
        adapters: LoraRequests = None,
    ) -> RequestBatch:
        """Make the requests for prompts, with the parameters and adapters of each."""
        digests = self._digests(adapters, len(inputs))
        hints = input_processor.scheduling_hints_for(priority, len(inputs))
        inbox: Inbox = SimpleQueue()
        with self.numbers:
            first = self.count

            def make_processor(i: int) -> OutputProcessor:
                return self._make_processor(
                    inputs[i],
                    inbox.put,
                    all_params[i],
                    count=first + i,
                    streaming=streaming,
                    urgency=hints[i],
                    adapter=digests[i],
                )

            processors = [
                _make_numbered(make_processor, i, len(inputs)) for i in range(len(inputs))
            ]
            self.count += len(processors)
        return RequestBatch(processors, inbox)

    def _digests(self, requests: LoraRequests, count: int) -> list[str]:
        """Returns the digest of the adapter of each prompt, from one for all or one for
        each. Raises RequestError.
        """
        if isinstance(requests, str) or not isinstance(requests, Sequence):
            return [digest_of(self.adapters, requests)] * count
        if len(requests) != count:
            raise input_processor.RequestError(
                f"{len(requests)} lora_request for {count} prompts; give one, or one for "
                "each prompt",
                param="lora_request",
            )
        return [digest_of(self.adapters, request) for request in requests]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _make_numbered(
    make: Callable[[int], OutputProcessor], i: int, count: int
) -> OutputProcessor:
    """Make job `i` of `count`; an error names its index."""
    try:
        return make(i)
    except input_processor.RequestError as error:
        prefix = f"prompts[{i}]: " if count > 1 else ""
        raise type(error)(f"{prefix}{error}", i, error.param) from None


def _note_content_format(name: str) -> None:
    """Log that a format of contents has no effect. Raises RequestError for an unknown
    one.
    """
    if name not in _CONTENT_FORMATS:
        raise input_processor.RequestError(
            f"chat_template_content_format must be one of {', '.join(_CONTENT_FORMATS)}, "
            f"not {name!r}",
            param="chat_template_content_format",
        )
    if name != _CONTENT_FORMATS[0]:
        _log.warning(
            "chat_template_content_format=%r has no effect: the chat template decides "
            "whether contents are texts or lists",
            name,
        )


def _take_output(inbox: Inbox) -> RequestOutput:
    return inbox.get().take()


@contextlib.contextmanager
def _progress(count: int, make_bar: Progress) -> Iterator[Callable[[], object]]:
    """Yield a function that advances a progress bar, which is shown on a terminal."""
    if not make_bar or not count or (make_bar is True and not sys.stderr.isatty()):
        yield lambda: None
        return
    if make_bar is True:
        from tqdm import tqdm

        make_bar = partial(tqdm, unit="prompt", leave=False)
    bar = make_bar(total=count, desc="Processed prompts")
    try:
        yield bar.update
    finally:
        bar.close()

"""POST /v1/chat/completions: answers a conversation."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Final, Self

import attrs
from pydantic import Field, model_validator

from minfer.effects.live.input_processing.prompts import TokenizedPrompt
from minfer.effects.serving.openai.chat_messages import (
    ChatMessage,
    check_calls,
    have_tool_calls,
)
from minfer.effects.serving.openai.chat_writing import writer
from minfer.effects.serving.openai.fields import GenerationBody, ItemLimit, TopLogprobs
from minfer.effects.serving.openai.template_fields import (
    Effort,
    RequestTemplate,
    Verbosity,
    check_prompt,
    render,
    template_kwargs,
)
from minfer.effects.serving.openai.tools import (
    ChatTool,
    ToolChoice,
    call_requirements,
    check_tools,
    offered_tools,
)
from minfer.effects.serving.protocol import Endpoint, GenerationRequest, ModelInfo
from minfer.effects.serving.request_parsing.answer_parsing import (
    check_template,
    parsing_of,
)
from minfer.effects.serving.request_parsing.bodies import invalid_value, read_body
from minfer.effects.serving.request_parsing.tool_constraints import (
    constrain_after_reasoning,
    constrain_calls,
    with_constraint,
)
from minfer.effects.serving.wire.error_form import failure

TemplateOptionLimit: Final = Field(max_length=256)  # names for a template


class ChatBody(GenerationBody):
    """A conversation, and the parameters of its answer."""

    messages: Annotated[list[ChatMessage], ItemLimit, Field(min_length=1)]
    add_generation_prompt: bool | None = None  # None: if the last message is complete
    continue_final_message: bool = False
    chat_template: RequestTemplate | None = None  # vLLM's
    chat_template_kwargs: Annotated[dict[str, Any], TemplateOptionLimit] | None = None
    reasoning_effort: Effort | None = None
    verbosity: Verbosity | None = None
    logprobs: bool = False
    top_logprobs: TopLogprobs = 0
    tools: Annotated[list[ChatTool], ItemLimit] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True  # vLLM's

    @model_validator(mode="after")
    def _scores_fit(self) -> Self:
        if self.top_logprobs and self.scored is None:
            raise invalid_value("needs logprobs to be true", "top_logprobs")
        return self

    @model_validator(mode="after")
    def _samples_fit(self) -> Self:
        if self.add_special_tokens:
            message = "is not supported here: the chat template writes its own"
            raise invalid_value(message, "add_special_tokens")
        if not self.use_beam_search and self.best_of not in (None, self.n):
            raise invalid_value("is not supported here; leave it out", "best_of")
        for name in ("max_tokens", "max_completion_tokens"):
            if getattr(self, name) == 0:
                raise invalid_value("must be at least 1", name)
        return self

    @model_validator(mode="after")
    def _calls_fit(self) -> Self:
        check_calls(self.messages)
        names = [tool.function.name for tool in self.tools or ()]
        check_tools(names, self.tool_choice)
        return self

    @property
    def scored(self) -> int | None:
        """How many of the likeliest tokens are listed; None if no log-probability is
        requested.
        """
        return self.top_logprobs if self.logprobs else None

    @property
    def offered(self) -> list[ChatTool]:
        """The tools in the prompt."""
        return [] if self.tool_choice == "none" else self.tools or []

    def generation(self, llm: ModelInfo) -> GenerationRequest:
        """The conversation as one prompt. Raises ChatTemplateError, RequestError,
        ParameterError and ApiError.
        """
        if self.offered:
            check_template(llm.parsers, "tools")
        elif have_tool_calls(self.messages):
            check_template(llm.parsers, "messages")
        ids = self._ids(llm)
        parallel = self.parallel_tool_calls
        offers = offered_tools(self.offered)
        tools = {offer.name: offer.parameters for offer in offers}
        prefix = self.messages[-1].text if self.continue_final_message else ""
        parsing = parsing_of(llm, ids, tools, parallel=parallel, prefix=prefix)
        # By default, an answer may take the rest of the context.
        sampling_args = {"max_tokens": None, **self.sampling()}
        params = llm.setup.default_sampling_params(**sampling_args)
        request = self.request(
            [TokenizedPrompt(None, ids, self.cache_salt.encode())], params
        )
        requirements = call_requirements(self.tool_choice, parallel=parallel)
        constraint = self.constraint()
        added_constraint = constrain_calls(llm, offers, requirements, parsing, constraint)
        added_constraint = added_constraint or constrain_after_reasoning(
            llm, ids, parsing, constraint
        )
        include = attrs.evolve(request.include, reasoning=self.include_reasoning)
        request = attrs.evolve(request, parsing=parsing, include=include)
        return with_constraint(request, added_constraint)

    def _ids(self, llm: ModelInfo) -> Sequence[int]:
        continues = self.continue_final_message
        adds_prompt = self.add_generation_prompt
        ids = render(
            llm,
            self.chat_template,
            [message.to_turn() for message in self.messages],
            tools=[tool.to_json() for tool in self.offered] or None,
            add_generation_prompt=not continues if adds_prompt is None else adds_prompt,
            continue_final_message=continues,
            chat_template_kwargs=template_kwargs(
                self.chat_template_kwargs, self.reasoning_effort, self.verbosity
            ),
        )
        truncated = self.truncated(ids, llm)
        if self.chat_template is not None:
            check_prompt(truncated, llm)
        return truncated


ENDPOINT: Final = Endpoint(
    name="chat",
    path="/v1/chat/completions",
    summary="Answer a conversation.",
    body=ChatBody,
    id_prefix="chatcmpl",
    prompt_field="messages",
    read=partial(read_body, ChatBody),
    writer=writer,
    failure=failure,
)

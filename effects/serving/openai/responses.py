"""POST /v1/responses: OpenAI's newer API; a list of items is answered with one.

Nothing is stored: `store` is accepted, and every response has it as false. Requests for
stored responses, tools of the server or other kinds of items are refused by name.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from minfer.effects.live.input_processing.input_processor import SchedulingHints
from minfer.effects.live.input_processing.prompts import TokenizedPrompt
from minfer.effects.serving.access.reasoning_cipher import IS_INSTALLED
from minfer.effects.serving.client_errors import ApiError
from minfer.effects.serving.openai.fields import CacheKey, Client, ItemLimit, ServiceTier
from minfer.effects.serving.openai.response_input import (
    AdditionalToolsInput,
    AnyItem,
    MessageInput,
    check_outputs,
    turns_of,
)
from minfer.effects.serving.openai.response_options import (
    ReasoningOptions,
    ResponseStreamOptions,
    SampledBody,
    TextOptions,
)
from minfer.effects.serving.openai.response_tools import (
    AllowedFunctions,
    FlatTool,
    FunctionChoice,
    HostedTool,
    NamedFunction,
    NamespaceTool,
    ResponseTools,
    chat_choice,
    flatten,
    hosted_tools,
)
from minfer.effects.serving.openai.response_writing import writer
from minfer.effects.serving.openai.template_fields import (
    Effort,
    Verbosity,
    template_kwargs,
)
from minfer.effects.serving.openai.tools import (
    call_requirements,
    check_tools,
)
from minfer.effects.serving.protocol import (
    CallTarget,
    Endpoint,
    GenerationRequest,
    Include,
    ModelInfo,
)
from minfer.effects.serving.request_parsing.answer_parsing import (
    check_template,
    parsing_of,
)
from minfer.effects.serving.request_parsing.bodies import (
    ANYTHING,
    HINT,
    invalid_value,
    read_body,
    short_json,
)
from minfer.effects.serving.request_parsing.ignored_hints import note_ignored
from minfer.effects.serving.request_parsing.tool_constraints import (
    check_names,
    constrain_after_reasoning,
    constrain_calls,
    with_constraint,
)
from minfer.effects.serving.request_parsing.typed_hints import hint
from minfer.effects.serving.wire.error_form import stream_failure

# Values of `include`: one that is refused, and one that adds something.
_LOGPROBS_VALUE: Final = "message.output_text.logprobs"
_ENCRYPTED_VALUE: Final = "reasoning.encrypted_content"
_MAX_OUTPUT_TOKENS: Final = 2**31
# Fields that are not supported, with the values at which they change nothing.
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "max_tool_calls": (ANYTHING,),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "prompt_cache_options": (HINT,),
    "prompt_cache_retention": (HINT,),
    "top_logprobs": (0,),
}


def _to_items(value: object) -> object:
    """Input as a list of items: a string is a user's message."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def _check_include(include: list[str]) -> list[str]:
    """The values of `include`: those that only concern tools or images are accepted."""
    if _LOGPROBS_VALUE in include:
        raise invalid_value(
            f"{short_json(_LOGPROBS_VALUE)} is not supported; leave it out"
        )
    return include


class ResponsesBody(SampledBody):
    """Items, and the parameters of their answer."""

    neutral = _NEUTRAL
    model: str | None = None
    input: Annotated[
        list[AnyItem],
        ItemLimit,
        Field(min_length=1),
        BeforeValidator(_to_items, json_schema_input_type=str | list[MessageInput]),
    ]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=_MAX_OUTPUT_TOKENS)] | None = None
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    store: Annotated[bool | None, hint("store", False)] = None
    include: Annotated[list[str], ItemLimit, AfterValidator(_check_include)] | None = None
    metadata: dict[str, str] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: ResponseTools | None = None
    tool_choice: FunctionChoice | None = None
    parallel_tool_calls: bool = True
    truncation: Annotated[Literal["auto", "disabled"], hint("truncation", "disabled")] = (
        "disabled"
    )
    service_tier: ServiceTier | None = None
    prompt_cache_key: CacheKey | None = None
    client_metadata: dict[str, Any] | None = None
    user: Client = ""
    safety_identifier: Client = ""

    @model_validator(mode="after")
    def _calls_fit(self) -> Self:
        check_outputs(self.input)
        for tools, field_path in self._tool_lists:
            names = [tool.name for tool in flatten(tools, field_path)]
            check_names(names, field_path)
        offered = self._flat_tools
        choice = chat_choice(self.tool_choice, offered)
        check_tools([tool.name for tool in offered], choice)
        return self

    @property
    def _tool_lists(self) -> list[tuple[ResponseTools, str]]:
        """All lists of tools, with their places in the body."""
        lists = [(self.tools or [], "tools")]
        lists += [
            (item.tools, f"input[{number}].tools")
            for number, item in enumerate(self.input)
            if isinstance(item, AdditionalToolsInput)
        ]
        return lists

    @property
    def _flat_tools(self) -> list[FlatTool]:
        """The tools as functions. An additional one replaces an earlier one of the same
        name.
        """
        by_name: dict[str, FlatTool] = {}
        for tools, field_path in self._tool_lists:
            by_name |= {tool.name: tool for tool in flatten(tools, field_path)}
        return list(by_name.values())

    @property
    def offered(self) -> list[FlatTool]:
        """The tools in the prompt."""
        return [] if self.tool_choice == "none" else self._flat_tools

    def generation(self, llm: ModelInfo) -> GenerationRequest:
        """The items as one prompt. Raises ChatTemplateError, RequestError,
        ParameterError and ApiError.
        """
        offered = self.offered
        self._note_ignored(llm)
        ids = self._ids(llm, offered)
        sampling_args = self.sampling()
        constraint = None if self.text is None else self.text.constraint()
        if constraint is not None:
            sampling_args["structured_outputs"] = constraint.build()
        params = llm.setup.default_sampling_params(
            **sampling_args, max_tokens=self.max_output_tokens
        )
        parallel = self.parallel_tool_calls
        offers = [tool.offered() for tool in offered]
        tools = {offer.name: offer.parameters for offer in offers}
        parsing = parsing_of(llm, ids, tools, parallel=parallel)
        request = GenerationRequest(
            prompts=(TokenizedPrompt(None, ids, self.cache_salt.encode()),),
            params=params,
            urgency=SchedulingHints(
                priority=self.priority, client=self.safety_identifier or self.user
            ),
            chosen_id=self.request_id,
            stream=self.stream,
            include=self._included(llm, offered),
            constraint_field="" if constraint is None else constraint.field,
            parsing=parsing,
            max_tokens_field=""
            if self.max_output_tokens is None
            else "max_output_tokens",
        )
        choice = chat_choice(self.tool_choice, offered)
        requirements = call_requirements(choice, parallel=parallel)
        added_constraint = constrain_calls(llm, offers, requirements, parsing, constraint)
        added_constraint = added_constraint or constrain_after_reasoning(
            llm, ids, parsing, constraint
        )
        return with_constraint(request, added_constraint)

    def _note_ignored(self, llm: ModelInfo) -> None:
        """Note hints without effect. Raises ApiError for tools that run elsewhere, if the
        server refuses them.
        """
        for tools, field_path in self._tool_lists:
            for place, kind in hosted_tools(tools, field_path).items():
                if llm.refuses_hosted_tools:
                    message = f"{short_json(kind)} runs on OpenAI's servers; leave it out"
                    raise ApiError(f"{place}.type: {message}", f"{place}.type")
                note_ignored(f"tools.{kind}")
            spaces = [tool for tool in tools if isinstance(tool, NamespaceTool)]
            if any(space.description and not space.tools for space in spaces):
                note_ignored("tools.description")
        if any(
            value != _ENCRYPTED_VALUE or not IS_INSTALLED for value in self.include or ()
        ):
            note_ignored("include")

    def _included(self, llm: ModelInfo, offered: Sequence[FlatTool]) -> Include:
        encrypts = _ENCRYPTED_VALUE in (self.include or ()) and IS_INSTALLED
        targets = {tool.name: tool.target for tool in offered}
        return Include(
            repeat=self._echoed_fields(),
            call_targets={
                name: target
                for name, target in targets.items()
                if target != CallTarget(name=name)
            },
            reasoning_key=llm.reasoning_key if encrypts else b"",
        )

    def _ids(self, llm: ModelInfo, offered: Sequence[FlatTool]) -> list[int]:
        turns = turns_of(self.input, llm.reasoning_key)
        if offered:
            check_template(llm.parsers, "tools")
        elif any("tool_calls" in turn or turn["role"] == "tool" for turn in turns):
            check_template(llm.parsers, "input")
        if self.instructions is not None:
            turns = [{"role": "system", "content": self.instructions}, *turns]
        tools = [tool.to_json() for tool in offered]
        kwargs = template_kwargs(None, self._effort, self._verbosity)
        return llm.render(turns, tools=tools or None, chat_template_kwargs=kwargs)

    @property
    def _effort(self) -> Effort | None:
        return None if self.reasoning is None else self.reasoning.effort

    @property
    def _verbosity(self) -> Verbosity | None:
        return None if self.text is None else self.text.verbosity

    def _echoed_fields(self) -> dict[str, object]:
        """The request's fields that a response repeats, as they were given."""
        form = None if self.text is None else self.text.format
        text = {"format": form or {"type": "text"}}
        verbosity = self._verbosity
        choice: object = self.tool_choice
        if isinstance(choice, NamedFunction | AllowedFunctions):
            choice = choice.model_dump(exclude_none=True)
        return {
            "reasoning": {"effort": self._effort, "summary": None},
            "text": text if verbosity is None else {**text, "verbosity": verbosity},
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls,
            "safety_identifier": self.safety_identifier or None,
            "tool_choice": choice or "auto",
            "tools": [
                tool.to_json()
                for tool in self.tools or ()
                if not isinstance(tool, HostedTool)
            ],
            "user": self.user or None,
        }


ENDPOINT: Final = Endpoint(
    name="responses",
    path="/v1/responses",
    summary="Answer a list of items, as OpenAI's Responses API does.",
    body=ResponsesBody,
    id_prefix="resp",
    prompt_field="input",
    read=partial(read_body, ResponsesBody),
    writer=writer,
    failure=stream_failure,
)

"""POST /v1/responses: OpenAI's newer API; a list of items is answered with one.

Nothing is stored: `store` is accepted, and every response has it as false. Requests for
stored responses, tools of the server or other kinds of items are refused by name.
"""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from minfer.effects.live.input_processing.input_processor import Urgency
from minfer.effects.live.input_processing.prompts import TokenizedPrompt
from minfer.effects.serving.client_errors import ApiError
from minfer.effects.serving.openai.fields import Client, Few
from minfer.effects.serving.openai.response_input import (
    AllowedFunctions,
    AnyItem,
    FunctionChoice,
    FunctionTool,
    MessageInput,
    NamedFunction,
    check_outputs,
    turns_of,
)
from minfer.effects.serving.openai.response_writing import writer
from minfer.effects.serving.openai.template_fields import (
    Effort,
    Verbosity,
    template_kwargs,
)
from minfer.effects.serving.openai.tools import (
    ToolChoice,
    call_requirements,
    check_tools,
    offered_tools,
)
from minfer.effects.serving.protocol import (
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
    StrictObject,
    read_body,
    shown,
    wrong,
)
from minfer.effects.serving.request_parsing.structured_fields import (
    Constraint,
    schema_constraint,
)
from minfer.effects.serving.request_parsing.tool_constraints import (
    constrain_after_reasoning,
    constrain_calls,
    with_constraint,
)
from minfer.effects.serving.wire.error_form import stream_failure

_SCORES: Final = "message.output_text.logprobs"  # the value of `include` that is refused
_LARGEST: Final = 2**31  # output tokens
# Fields that are not supported, with the values at which they change nothing.
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "max_tool_calls": (ANYTHING,),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "prompt_cache_key": (ANYTHING,),
    "prompt_cache_options": (ANYTHING,),
    "prompt_cache_retention": (ANYTHING,),
    "service_tier": ("auto", "default"),
    "top_logprobs": (0,),
}

_KINDS: Final = ("text", "json_object", "json_schema")  # of a text's format
_LONGEST_NAME: Final = 64  # characters of a name that an error shows


class TextOptions(StrictObject):
    """The format of the text, and how much of it is requested."""

    format: dict[str, Any] | None = None
    verbosity: Verbosity | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        self.constraint()
        return self

    def constraint(self) -> Constraint | None:
        """The constraint of the format, if any. Raises ApiError."""
        where = "text.format"
        content = dict(self.format or {})
        match content.pop("type", "text"):
            case "text" if not content:
                return None
            case "json_object" if not content:
                return Constraint({"json_object": True}, where)
            case "json_schema":
                return schema_constraint(content, where)
            case str(kind) if kind in _KINDS:
                field = f"{where}.{min(content)[:_LONGEST_NAME]}"
                raise ApiError(f"{field}: is not a field here; leave it out", field)
            case kind:
                there = " or ".join(map(shown, _KINDS))
                why = f"{shown(kind)} is not supported; there is {there}"
                raise ApiError(f"{where}.type: {why}", f"{where}.type")


class ReasoningOptions(StrictObject):
    """How much to reason. There are no summaries of it, so that "auto" means none."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "generate_summary": ("auto",),
        "summary": ("auto",),
    }
    effort: Effort | None = None


class ResponseStreamOptions(StrictObject):
    """A stream is never padded."""

    include_obfuscation: Literal[False] = False


def _items(given: object) -> object:
    """Input as a list of items: a string is a user's message."""
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


def _check_include(include: list[str]) -> list[str]:
    """The values of `include`: those that only concern tools or images are accepted."""
    if _SCORES in include:
        raise wrong(f"{shown(_SCORES)} is not supported; leave it out")
    return include


class ResponsesBody(StrictObject):
    """Items, and the parameters of their answer."""

    neutral = _NEUTRAL
    model: str | None = None
    input: Annotated[
        list[AnyItem],
        Few,
        Field(min_length=1),
        BeforeValidator(_items, json_schema_input_type=str | list[MessageInput]),
    ]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=_LARGEST)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    include: Annotated[list[str], Few, AfterValidator(_check_include)] | None = None
    metadata: dict[str, str] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[FunctionTool], Few] | None = None
    tool_choice: FunctionChoice | None = None
    parallel_tool_calls: bool = True
    truncation: Literal["disabled"] = "disabled"
    user: Client = ""
    safety_identifier: Client = ""

    @model_validator(mode="after")
    def _calls_fit(self) -> Self:
        check_outputs(self.input)
        tools = [one.tool() for one in self.tools or ()]
        check_tools(tools, self._choice)
        return self

    @property
    def _choice(self) -> ToolChoice | None:
        choice = self.tool_choice
        return choice if isinstance(choice, str | None) else choice.to_chat()

    @property
    def offered(self) -> list[FunctionTool]:
        """The tools in the prompt."""
        return [] if self.tool_choice == "none" else self.tools or []

    def generation(self, llm: ModelInfo) -> GenerationRequest:
        """The items as one prompt. Raises ChatTemplateError, RequestError,
        ParameterError and ApiError.
        """
        ids = self._ids(llm)
        given = self.model_dump(include={"temperature", "top_p"}, exclude_none=True)
        constraint = None if self.text is None else self.text.constraint()
        if constraint is not None:
            given["structured_outputs"] = constraint.build()
        params = llm.setup.default_sampling_params(
            **given, max_tokens=self.max_output_tokens
        )
        several = self.parallel_tool_calls
        offers = offered_tools([one.tool() for one in self.offered], inside="")
        tools = {one.name: one.parameters for one in offers}
        parsing = parsing_of(llm, ids, tools, parallel=several)
        request = GenerationRequest(
            prompts=(TokenizedPrompt(None, ids),),
            params=params,
            urgency=Urgency(client=self.safety_identifier or self.user),
            stream=self.stream,
            include=Include(repeat=self._echoed_fields()),
            constraint_field="" if constraint is None else constraint.field,
            parsing=parsing,
            max_tokens_field=""
            if self.max_output_tokens is None
            else "max_output_tokens",
        )
        requirements = call_requirements(self._choice, several=several)
        added = constrain_calls(llm, offers, requirements, parsing, constraint)
        added = added or constrain_after_reasoning(llm, ids, parsing, constraint)
        return with_constraint(request, added)

    def _ids(self, llm: ModelInfo) -> list[int]:
        turns = turns_of(self.input)
        if self.offered:
            check_template(llm.parsers, "tools")
        elif any("tool_calls" in turn or turn["role"] == "tool" for turn in turns):
            check_template(llm.parsers, "input")
        if self.instructions is not None:
            turns = [{"role": "system", "content": self.instructions}, *turns]
        tools = [one.tool().to_json() for one in self.offered]
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
            choice = choice.model_dump()
        return {
            "reasoning": {"effort": self._effort, "summary": None},
            "text": text if verbosity is None else {**text, "verbosity": verbosity},
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls,
            "safety_identifier": self.safety_identifier or None,
            "tool_choice": choice or "auto",
            "tools": [one.shown() for one in self.tools or ()],
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

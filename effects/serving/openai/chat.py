"""POST /v1/chat/completions: a conversation is answered."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from minfer.effects.live.prompts import Asked
from minfer.effects.serving.bodies import ANYTHING, StrictObject, read_body, shown, wrong
from minfer.effects.serving.openai.errors import failure
from minfer.effects.serving.openai.fields import MAX_ITEMS, Few, GenerationBody, Top
from minfer.effects.serving.openai.logprobs import chat_logprobs
from minfer.effects.serving.openai.writing import ChunkWriter, JsonObject, ObjectWriter
from minfer.effects.serving.protocol import Endpoint, GenerationRequest, Grounds, Writer
from minfer.effects.serving.stamp import Stamp
from minfer.effects.serving.transports.transport import Event
from minfer.effects.text.outputs import CompletionOutput
from minfer.effects.text.tokenizer import Tokenizer

# Fields that are not supported, with the values at which they ask for nothing.
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": ("",),
    "tool_call_id": (ANYTHING,),  # of tool messages, which are refused by their role
    "tool_calls": ([],),
}
Options: Final = Field(max_length=256)  # names for a template


class TextPart(StrictObject):
    """A part of a message's content, as it is described: `_text` reads it."""

    type: Literal["text"]
    text: str


def _text(content: Any) -> Any:
    """A message's text; parts are lines of it, as in vLLM."""
    if not isinstance(content, list):
        return content
    if len(content) > MAX_ITEMS:
        raise wrong(f"must have at most {MAX_ITEMS} parts")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else part
        if kind != "text":
            raise wrong(f"must be 'text', not {shown(kind)}", "type")
        if len(part) > 2 or not isinstance(part.get("text"), str):
            raise wrong("must be a string, and the only field beside the type", "text")
    return "\n".join(part["text"] for part in content)


def _role(role: object) -> object:
    """A role by the name that models were trained with."""
    if role in ("tool", "function"):  # their calls cannot be asked for either
        raise wrong(f"{shown(role)} messages are not supported; leave them out")
    return "system" if role == "developer" else role


class Message(StrictObject):
    """One message; what is neutral is in what OpenAI's SDK hands back of an answer."""

    neutral = _NEUTRAL
    role: Annotated[
        Literal["system", "user", "assistant"],
        BeforeValidator(
            _role,
            json_schema_input_type=Literal["system", "developer", "user", "assistant"],
        ),
    ]
    content: Annotated[
        str, BeforeValidator(_text, json_schema_input_type=str | list[TextPart])
    ]
    name: str | None = None


class ChatBody(GenerationBody):
    """A conversation, and how it is to be answered."""

    messages: Annotated[list[Message], Few, Field(min_length=1)]
    add_generation_prompt: bool | None = None  # None: unless the last message goes on
    continue_final_message: bool = False
    chat_template_kwargs: Annotated[dict[str, Any], Options] | None = None
    logprobs: bool = False
    top_logprobs: Top = 0

    @model_validator(mode="after")
    def _scores_fit(self) -> Self:
        if self.top_logprobs and self.scored is None:
            raise wrong("needs logprobs to be true", "top_logprobs")
        return self

    @property
    def scored(self) -> int | None:
        """How many of the likeliest tokens are to be named; None if no log-probability
        is.
        """
        return self.top_logprobs if self.logprobs else None

    def generation(self, llm: Grounds) -> GenerationRequest:
        """The conversation as one prompt. Raises ChatTemplateError, RequestError and
        ParameterError.
        """
        goes_on = self.continue_final_message
        begins = self.add_generation_prompt
        ids = llm.render(
            [message.model_dump(exclude_none=True) for message in self.messages],
            add_generation_prompt=not goes_on if begins is None else begins,
            continue_final_message=goes_on,
            chat_template_kwargs=self.chat_template_kwargs,
        )
        # Unless told otherwise, an answer takes what room the context has.
        given = {"max_tokens": None, **self.sampling()}
        params = llm.setup.default_sampling_params(**given)
        return self.request([Asked(None, ids, self.cache_salt.encode())], params)


class ChatChunks(ChunkWriter):
    """A streamed answer: the role, then what is new of the content, then why it ended."""

    def __init__(
        self, stamp: Stamp, request: GenerationRequest, tokenizer: Tokenizer | None
    ) -> None:
        super().__init__(stamp, "chat.completion.chunk", request.include)
        self._top = request.include.top_logprobs
        self._tokenizer = tokenizer
        self._begun: set[int] = set()  # choices whose role was sent

    def write(self, choice: int, delta: CompletionOutput) -> list[Event]:
        """The chunks for what is new of a choice."""
        events = []
        if choice not in self._begun:
            self._begun.add(choice)
            events.append(self._delta(choice, {"role": "assistant", "content": ""}))
        if delta.text or delta.logprobs:
            scores = _scores(delta, self._top, self._tokenizer)
            events.append(self._delta(choice, {"content": delta.text}, scores))
        if delta.finish_reason:
            events.append(self._delta(choice, {}, end=delta.finish_reason))
        return events

    def _delta(
        self,
        choice: int,
        delta: dict[str, str],
        scores: JsonObject | None = None,
        end: str | None = None,
    ) -> Event:
        return self.chunk(
            {"index": choice, "logprobs": scores, "delta": delta, "finish_reason": end}
        )


class ChatObject(ObjectWriter):
    """An answer in one piece."""

    def __init__(
        self, stamp: Stamp, request: GenerationRequest, tokenizer: Tokenizer | None
    ) -> None:
        super().__init__(stamp, "chat.completion", request.include)
        self._top = request.include.top_logprobs
        self._tokenizer = tokenizer

    def write(self, choice: int, delta: CompletionOutput) -> list[Event]:
        """Keep a choice, which comes whole."""
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        told: JsonObject = {
            "index": choice,
            "logprobs": _scores(delta, self._top, self._tokenizer),
            "message": message,
            "finish_reason": delta.finish_reason,
        }
        return self.keep(choice, told)


def _scores(
    delta: CompletionOutput, top: int, tokenizer: Tokenizer | None
) -> JsonObject | None:
    return chat_logprobs(delta.logprobs, top, tokenizer) if delta.logprobs else None


def writer(
    stamp: Stamp, request: GenerationRequest, tokenizer: Tokenizer | None
) -> Writer:
    """What writes an answer as it was asked for."""
    kind = ChatChunks if request.stream else ChatObject
    return kind(stamp, request, tokenizer)


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

"""What clients may ask for, and how answers are written: the shapes of OpenAI's API.

A request is checked field by field before anything runs, and every error names its field. What is
known but not supported, and would change the output, is refused unless it asks for nothing; fields
that cannot change it are ignored. Null means absent.
"""

import difflib
import json
import math
import time
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError, from_json

from minfer.effects.edge import MAX_CLIENT

MAX_ITEMS: Final = 4096  # messages; prompts of one request, times n
_ANY: Final = object()
# Fields that are not supported, with the values at which they ask for nothing.
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "audio": (), "frequency_penalty": (0,), "function_call": ("none", "auto"), "functions": ([],),
    "include_stop_str_in_output": (False,), "logit_bias": ({},), "logprobs": (False,),
    "metadata": (_ANY,), "min_p": (0,), "min_tokens": (0,), "modalities": (["text"],),
    "moderation": (), "parallel_tool_calls": (_ANY,), "prediction": (), "presence_penalty": (0,),
    "prompt_cache_key": (_ANY,), "prompt_cache_options": (_ANY,),
    "prompt_cache_retention": (_ANY,), "reasoning_effort": ("none",), "repetition_penalty": (1,),
    "response_format": ({"type": "text"},), "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,), "store": (False,), "suffix": ("",),
    "tool_choice": ("none", "auto"), "tools": ([],), "top_logprobs": (0,), "verbosity": ("medium",),
    "web_search_options": (),
}  # fmt: skip
_SAMPLING: Final = {"n", "temperature", "top_p", "top_k", "seed", "max_tokens", "stop",
                    "stop_token_ids", "ignore_eos"}  # fmt: skip


class ApiError(Exception):
    """What a client is told instead of an answer."""

    def __init__(
        self, message: str, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


def _wrong(message: str, field: str | None = None) -> PydanticCustomError:
    """What is wrong with a value, or with a field of it."""
    return PydanticCustomError("wrong", "{said}", {"said": message, "field": field})


class _Object(BaseModel):
    """A JSON object: strict types, finite numbers, known fields."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, frozen=True)
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        """Refuse the first field that is unknown or unsupported: there may be a million of them."""
        if not isinstance(given, dict):
            raise _wrong("must be an object")
        for name, value in given.items():
            if name in cls.model_fields:
                continue
            if name not in cls.neutral:
                near = difflib.get_close_matches(name[:64], cls.model_fields, 1)
                hint = f"did you mean {near[0]}?" if near else "leave it out"
                raise _wrong(f"is not a field here; {hint}", name[:64])
            if value is not None and not any(_same(value, one) for one in cls.neutral[name]):
                raise _wrong("is not supported; leave it out", name)
        return {k: v for k, v in given.items() if v is not None and k in cls.model_fields}


def _same(value: Any, neutral: Any) -> bool:
    # False equals 0 in Python, but not in JSON.
    equal = value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
    return neutral is _ANY or equal


def _few(value: Any) -> Any:
    if isinstance(value, list) and not 0 < len(value) <= MAX_ITEMS:
        raise _wrong(f"has {len(value)} items; there may be 1 to {MAX_ITEMS}")
    return value


def _in_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else _few(value) if value else value


def _prompts(given: Any) -> Any:
    single = isinstance(given, list) and all(type(one) is int for one in given[:1])
    many = [given] if single else _in_list(given)
    for one in many if isinstance(many, list) else [many]:
        # type() and not isinstance: true is no token id.
        if not isinstance(one, str) and (type(one) is not list or set(map(type, one)) - {int}):
            raise _wrong("must be a string, a list of token ids, or a list of these")
    return many


def _text(value: Any) -> Any:
    """A message's text; parts are lines of it, as in vLLM."""
    for part in value if isinstance(value, list) else ():
        kind = part.get("type") if isinstance(part, dict) else part
        if kind != "text":
            raise _wrong(f"must be 'text', not {json.dumps(kind)[:80]}", "type")
        if len(part) > 2 or not isinstance(part.get("text"), str):
            raise _wrong("must be a string, and the only field beside the type", "text")
    return "\n".join(part["text"] for part in value) if isinstance(value, list) else value


Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Client = Annotated[str, Field(max_length=MAX_CLIENT)]


class Message(_Object):
    """One message; what is neutral is in what OpenAI's SDK hands back of an answer."""

    neutral = {"annotations": ([],), "audio": (), "function_call": (), "refusal": ("",),
               "tool_calls": ([],)}  # fmt: skip
    role: Annotated[
        Literal["system", "user", "assistant", "tool"],
        # The name that models were trained with.
        BeforeValidator(lambda role: "system" if role == "developer" else role),
    ]
    content: Annotated[str, BeforeValidator(_text)]
    name: str | None = None
    tool_call_id: str | None = None


class StreamOptions(_Object):
    """What a stream holds besides text; it is never padded."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class Body(_Object):
    """The fields that both endpoints know; the last ones are vLLM's, and `deadline` minfer's."""

    neutral = _NEUTRAL
    model: str | None = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    best_of: Whole | None = None
    max_tokens: Whole | None = None
    max_completion_tokens: Whole | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Whole | None = None
    stop: Annotated[list[str], Field(fail_fast=True), BeforeValidator(_in_list)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: Client = ""
    safety_identifier: Client = ""
    top_k: Whole | None = None
    stop_token_ids: Annotated[list[Whole], Field(fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(gt=-(2**53), lt=2**53)] = 0
    cache_salt: str = ""
    deadline: Annotated[float, Field(gt=0)] = math.inf  # seconds from arrival

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise _wrong("needs stream to be true", "stream_options")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise _wrong("leave it out; max_completion_tokens is set", "max_tokens")
        if self.best_of not in (None, self.n):
            raise _wrong("is not supported; leave it out", "best_of")
        if self.n * len(getattr(self, "prompt", ())) > MAX_ITEMS:
            raise _wrong(f"times prompts must not exceed {MAX_ITEMS}", "n")
        return self

    @classmethod
    def read(cls, data: bytes) -> Self:
        """The request in a body. Raises ApiError, which names the field."""
        try:
            return cls.model_validate(from_json(data, allow_inf_nan=False, cache_strings="none"))
        except ValidationError as error:
            raise _first(error) from None
        except ValueError as error:
            raise ApiError(f"the body is not valid JSON: {error}") from None

    def sampling(self) -> dict[str, Any]:
        """The sampling parameters that were given, by their names in SamplingParams."""
        found = self.model_dump(include=_SAMPLING, exclude_none=True)
        most = self.max_completion_tokens
        return found if most is None else {**found, "max_tokens": most}


class Completion(Body):
    """POST /v1/completions."""

    prompt: Annotated[list[Any], BeforeValidator(_prompts)]  # strings and lists of token ids
    echo: bool = False


class Chat(Body):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(fail_fast=True), BeforeValidator(_few)]
    add_generation_prompt: bool | None = None  # None: unless the last message goes on
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


def _first(error: ValidationError) -> ApiError:
    """The first thing that is wrong, in our words."""
    found = error.errors(include_url=False)[0]
    field = found.get("ctx", {}).get("field")
    place = (*found["loc"], *([] if field is None else [field]))
    where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in place).removeprefix(".")
    said, given = found["msg"].replace("Field required", "is missing"), found["input"]
    if isinstance(given, str | int | float) and said.startswith("Input"):
        said += f", not {json.dumps(given[:64] if isinstance(given, str) else given)[:80]}"
    said = said.replace("Input should be", "must be")
    return ApiError(f"{where or 'the body'}: {said}", where or None)


class Writer:
    """Writes the answer to one request, whole or as server-sent events."""

    def __init__(self, name: str, model: str, body: Body) -> None:
        self.chat, options = isinstance(body, Chat), body.stream_options
        self.counts = options is not None and options.include_usage
        self.begun: set[int] = set()  # choices whose role was sent
        kind = "chat.completion" if self.chat else "text_completion"
        self.head = {"id": name, "object": kind, "created": int(time.time()), "model": model}
        self.chunk = {**self.head, "object": f"{kind}.chunk" if self.chat else kind}
        if self.counts:
            self.chunk["usage"] = None

    def events(self, index: int, text: str, end: str | None) -> str:
        """What is new of a choice; `end` is its finish reason."""
        if not self.chat:
            return self._event(index, {"text": text}, end)
        said = [{"content": text}] if text else []
        if index not in self.begun:
            self.begun.add(index)
            said.insert(0, {"role": "assistant", "content": ""})
        out = "".join([self._event(index, {"delta": one}) for one in said])
        return out + self._event(index, {"delta": {}}, end) if end else out

    def _event(self, index: int, said: dict[str, Any], end: str | None = None) -> str:
        choice = {"index": index, **said, "logprobs": None, "finish_reason": end}
        return f"data: {json.dumps({**self.chunk, 'choices': [choice]})}\n\n"

    def last(self, usage: dict[str, Any]) -> str:
        """The end of a stream."""
        counted = json.dumps({**self.chunk, "choices": [], "usage": usage})
        return f"data: {counted}\n\ndata: [DONE]\n\n" if self.counts else "data: [DONE]\n\n"

    def whole(self, choices: Mapping[int, tuple[str, str]], usage: dict[str, Any]) -> str:
        """The answer in one piece; choices are texts and finish reasons."""
        made: list[dict[str, Any]] = []
        for i, (text, end) in sorted(choices.items()):
            message = {"role": "assistant", "content": text, "refusal": None}
            said = {"message": message} if self.chat else {"text": text}
            made.append({"index": i, **said, "logprobs": None, "finish_reason": end})
        return json.dumps({**self.head, "choices": made, "usage": usage})

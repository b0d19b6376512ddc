"""What clients may ask for, and how answers are written: the shapes of OpenAI's API.

A request is checked before anything runs, and every error names its field. What is known but not
supported is refused if it could change the output, and ignored if not. Null means absent.
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
            # False equals 0 in Python, but not in JSON.
            same = [(one, isinstance(one, bool)) for one in (None, *cls.neutral[name])]
            if _ANY not in cls.neutral[name] and (value, isinstance(value, bool)) not in same:
                raise _wrong("is not supported; leave it out", name)
        return {k: v for k, v in given.items() if v is not None and k in cls.model_fields}


def _prompts(given: Any) -> Any:
    single = not isinstance(given, list) or all(type(one) is int for one in given[:1])
    many = [given] if single else given
    for one in many[:MAX_ITEMS]:  # there may not be more
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


Few = Field(fail_fast=True, max_length=MAX_ITEMS)
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Stops = Annotated[list[str], Few, BeforeValidator(lambda s: [s] if isinstance(s, str) else s)]
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
    stop: Stops | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: Client = ""
    safety_identifier: Client = ""
    top_k: Whole | None = None
    stop_token_ids: Annotated[list[Whole], Few] | None = None
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
            first = error.errors(include_url=False)[0]
            said, given, field = first["msg"], first["input"], first.get("ctx", {}).get("field")
            place = (*first["loc"], *([] if field is None else [field]))
            where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in place)[1:]
            if isinstance(given, str | int | float) and said.startswith("Input"):
                said += f", not {json.dumps(given[:64] if isinstance(given, str) else given)[:80]}"
            said = said.replace("Field required", "is missing").replace("Input should", "must")
            raise ApiError(f"{where or 'the body'}: {said}", where or None) from None
        except ValueError as error:
            raise ApiError(f"the body is not valid JSON: {error}") from None

    def sampling(self) -> dict[str, Any]:
        """The sampling parameters that were given, by their names in SamplingParams."""
        found = self.model_dump(include=_SAMPLING, exclude_none=True)
        most = self.max_completion_tokens
        return found if most is None else {**found, "max_tokens": most}


class Completion(Body):
    """POST /v1/completions."""

    prompt: Annotated[list[Any], Few, BeforeValidator(_prompts)]  # strings and lists of token ids
    echo: bool = False


class Chat(Body):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Few, Field(min_length=1)]
    add_generation_prompt: bool | None = None  # None: unless the last message goes on
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class Writer:
    """Writes the answer to one request, whole or as server-sent events."""

    def __init__(self, name: str, model: str, body: Body) -> None:
        self.chat, self.stream, options = isinstance(body, Chat), body.stream, body.stream_options
        self.counts = options is not None and options.include_usage
        self.begun: set[int] = set()  # choices whose role was sent
        self.whole: dict[int, dict[str, Any]] = {}  # choices, where nothing is streamed
        kind = "chat.completion" if self.chat else "text_completion"
        kind += ".chunk" if self.chat and self.stream else ""
        self.head: dict[str, Any] = {"id": name, "object": kind, "created": int(time.time())}
        self.head |= {"model": model, "usage": None} if self.counts else {"model": model}

    def write(self, index: int, text: str, end: str | None) -> str:
        """What to send for what is new of a choice; `end` is its finish reason."""
        if not self.chat:
            said: list[dict[str, Any]] = [{"text": text}]
        elif not self.stream:
            said = [{"message": {"role": "assistant", "content": text, "refusal": None}}]
        else:
            said = [] if index in self.begun else [{"delta": {"role": "assistant", "content": ""}}]
            said += [{"delta": {"content": text}}] if text else []
            said += [{"delta": {}}] if end else []
            self.begun.add(index)
        choices = [{"index": index, **one, "logprobs": None, "finish_reason": None} for one in said]
        if end:
            choices[-1]["finish_reason"] = end
        if self.stream:
            return "".join([self._event([one]) for one in choices])
        self.whole[index] = choices[0]
        return ""

    def last(self, prompt: int, output: int, cached: int) -> str:
        """The end of a stream, or the answer in one piece. Numbers are tokens."""
        usage = {"prompt_tokens": prompt, "completion_tokens": output,
                 "total_tokens": prompt + output,
                 "prompt_tokens_details": {"cached_tokens": cached}}  # fmt: skip
        if self.stream:
            return (self._event([], usage=usage) if self.counts else "") + "data: [DONE]\n\n"
        choices = [self.whole[i] for i in sorted(self.whole)]
        return json.dumps({**self.head, "choices": choices, "usage": usage})

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        return f"data: {json.dumps({**self.head, 'choices': choices, **more})}\n\n"
